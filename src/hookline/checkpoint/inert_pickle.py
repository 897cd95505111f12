"""Read the structure of a pickle without unpickling it: objects become records of their names and values.

Python's unpickler calls whatever a file names. This reader imports nothing and calls nothing: an object is
the name of its class, with the arguments and the state that the file gives it.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class Record:
    """An object in a pickle: the name of its class or function, its arguments, and its state."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a class, a function or a constant in a pickle, such as `torch.float32`."""

    text: str


class RefusedName(ValueError):
    """A pickle requests a class or function that is not expected in it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it requests {name}")
        self.name = name


def read_records(data: bytes, is_expected: Callable[[str], bool]) -> Any:
    """Return the value in a pickle, with records instead of objects. Raise a ValueError for other opcodes.

    is_expected: tells whether a record of this name belongs into the file; `RefusedName` is raised if not.
    """
    machine = _Machine(is_expected)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return machine.result()
        machine.step(opcode.name, argument)
    raise ValueError("it is truncated")


LITERALS = frozenset(
    {
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
    }
)
"""Opcodes that push their argument."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
CONTAINERS: dict[str, type[dict[Any, Any]] | type[list[Any]] | type[set[Any]]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_SET": set,
}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The stack and the memo of the pickle format, for the opcodes that build plain values and records."""

    def __init__(self, is_expected: Callable[[str], bool]) -> None:
        self.is_expected = is_expected
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        """The stacks below each mark."""
        self.memo: dict[int, Any] = {}
        self.actions: dict[str, Callable[[Any], None]] = {
            "PROTO": self._skip,
            "FRAME": self._skip,
            "MARK": self._mark,
            "MEMOIZE": lambda _: self.memo.__setitem__(len(self.memo), self._top()),
            "BINPUT": lambda index: self.memo.__setitem__(index, self._top()),
            "LONG_BINPUT": lambda index: self.memo.__setitem__(index, self._top()),
            "BINGET": self._get,
            "LONG_BINGET": self._get,
            "TUPLE": lambda _: self._push_tuple(self._since_mark()),
            "APPEND": lambda _: self._append([self._pop()]),
            "APPENDS": lambda _: self._append(self._since_mark()),
            "SETITEM": lambda _: self._set_items([self._pop(), self._pop()][::-1]),
            "SETITEMS": lambda _: self._set_items(self._since_mark()),
            "GLOBAL": lambda text: self._push_name(text.replace(" ", ".")),
            "STACK_GLOBAL": self._name,
            "REDUCE": self._make_record,
            "NEWOBJ": self._make_record,
            "BUILD": self._set_state,
        }

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        if name in LITERALS:
            self.stack.append(argument)
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in CONTAINERS:
            self.stack.append(CONTAINERS[name]())
        elif name in SHORT_TUPLES:
            self._push_tuple([self._pop() for _ in range(SHORT_TUPLES[name])][::-1])
        elif name in self.actions:
            self.actions[name](argument)
        else:
            raise ValueError(f"it has the opcode {name}, which plain values do not need")

    def result(self) -> Any:
        """Return the only value that is left."""
        if len(self.stack) != 1 or self.marked:
            raise ValueError("it ends in the middle of a value")
        return self.stack[0]

    def _skip(self, argument: Any) -> None:
        """Do nothing for opcodes about the file itself."""

    def _top(self) -> Any:
        if not self.stack:
            raise ValueError("it takes a value that is not there")
        return self.stack[-1]

    def _pop(self) -> Any:
        self._top()
        return self.stack.pop()

    def _mark(self, _: Any) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        if not self.marked:
            raise ValueError("it takes values that are not there")
        found, self.stack = self.stack, self.marked.pop()
        return found

    def _get(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError("it refers to a value that is not there")
        self.stack.append(self.memo[index])

    def _push_tuple(self, values: list[Any]) -> None:
        self.stack.append(tuple(values))

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise ValueError("it appends to a value that is not a list")
        target.extend(values)

    def _set_items(self, items: list[Any]) -> None:
        target = self._top()
        # only these keys: hashing a deeply nested tuple overflows the stack of the process
        if not isinstance(target, dict) or not all(
            isinstance(each, str | int | Record) for each in items[::2]
        ):
            raise ValueError("it has a table with keys that are not text, numbers or objects")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _name(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("it has the name of a class that is not text")
        self._push_name(f"{module}.{name}")

    def _push_name(self, text: str) -> None:
        if not self.is_expected(text):
            raise RefusedName(text)
        self.stack.append(Name(text))

    def _make_record(self, _: Any) -> None:
        arguments, made = self._pop(), self._pop()
        if not isinstance(made, Name) or not isinstance(arguments, tuple):
            raise ValueError("it makes an object of something that is not a class")
        self.stack.append(Record(made.text, arguments))

    def _set_state(self, _: Any) -> None:
        state, record = self._pop(), self._top()
        if not isinstance(record, Record):
            raise ValueError("it sets the state of a value that is not an object")
        record.state = state
