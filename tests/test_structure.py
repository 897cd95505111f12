"""The shape of the source: layers, no cycles, light imports, short files. Read from the code, not from a list of promises."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hookline
from hookline.engine.events import EVENT_ROWS
from hookline.run.state import WRITTEN, State

SOURCE = Path(hookline.__file__).parent
NAMES = {
    ".".join(("hookline", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return the module of a source, then every node in it. Parsed once: many tests read the same files."""
    return tuple(ast.walk(ast.parse(source)))


@functools.cache
def packages() -> dict[str, set[str]]:
    """Return the packages and what each may import, as the third sentence of its `__init__` says."""
    found = {}
    for module, path in NAMES.items():
        if path.name == "__init__.py" and module.count(".") == 1:
            doc = " ".join((inspect.getdoc(importlib.import_module(module)) or "").split())
            named = re.search(r"May import: ([a-z, ]+)\.", doc)
            assert named, f"{module}: its docstring does not say what it may import"
            found[part(module)] = set(named[1].split(", ")) - {"nothing"}
    return found


TOP_LEVEL = {"", "__main__", "_moved", "_version"}
"""What is beside the packages: the package itself only names what can be imported from it."""
PLUG_INS = ("hooks", "config")
TORCH_FREE = ("util", "engine")
HEAVY = {"torch", "numpy", "rich", "jsonargparse", "safetensors"}
# the places that look modules up by name: lazy names, built-in hooks, and Module.load_from_checkpoint, which reads a format
# that lies a layer above it
BY_NAME = {
    "hookline",
    "hookline._moved",
    "hookline.engine.registry",
    "hookline.engine.foreign",
    "hookline.interop.lightning.package",  # callbacks of an installed package that is not imported yet
    "hookline.run.module",
}
LONGEST_FILE, LONGEST_FUNCTION = 600, 48


def part(module: str) -> str:
    """`hookline.training.fit` -> `training`."""
    return module.partition(".")[2].partition(".")[0]


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """Everything a module imports, in functions too, and whether that is for type checkers only."""
    found = nodes(NAMES[module].read_text())
    for_types = {
        id(inner)
        for node in found
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in found:
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: relative imports hide where a name comes from"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in NAMES else node.module), id(node) in for_types


@functools.cache
def own_imports(module: str) -> frozenset[str]:
    return frozenset(name for name, _ in imports(module) if name.partition(".")[0] == "hookline")


def test_beside_the_packages_there_is_next_to_nothing() -> None:
    assert {part(module) for module in NAMES} - set(packages()) == TOP_LEVEL


def test_packages_can_be_put_in_an_order_in_which_imports_point_to_earlier_ones() -> None:
    may, order = packages(), []
    while len(order) < len(may):
        ready = [name for name in may if name not in order and may[name] <= set(order)]
        assert ready, f"a cycle among {set(may) - set(order)}"
        order += ready


def test_a_module_imports_only_what_its_package_may() -> None:
    wrong = {}
    for module in NAMES:
        if part(module) not in TOP_LEVEL:
            known = {part(name) for name in own_imports(module)} - {part(module), "_version"}
            wrong[module] = known - packages()[part(module)]
    assert {module: parts for module, parts in wrong.items() if parts} == {}


def test_no_package_may_import_what_it_does_not_use() -> None:
    used: dict[str, set[str]] = {}
    for module in NAMES:
        used.setdefault(part(module), set()).update(part(name) for name in own_imports(module))
    assert {name: may - used[name] for name, may in packages().items() if may - used[name]} == {}


def test_plug_ins_know_neither_the_loops_nor_checkpoints() -> None:
    high = {"checkpoint", "reliability", "tracing", "control", "training", "interop"}
    assert {name: packages()[name] & high for name in PLUG_INS if packages()[name] & high} == {}


def test_only_what_offers_plug_ins_imports_them() -> None:
    assert {name for name, may in packages().items() if may & set(PLUG_INS)} == {"interop", "cli", "rewind"}


def test_no_module_takes_part_in_a_cycle_not_even_inside_a_function() -> None:
    graph = {module: own_imports(module) & set(NAMES) for module in NAMES}
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            raise AssertionError(" -> ".join([*trail[trail.index(module) :], module]))
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, [*trail, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_modules_are_looked_up_by_name_in_few_places_only() -> None:
    looking = set()
    for module, path in NAMES.items():
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if name in ("import_module", "__import__"):
                    looking.add(module)
    assert looking <= BY_NAME


@pytest.mark.parametrize("module", [name for name in NAMES if part(name) in TORCH_FREE])
def test_the_hook_engine_imports_nothing_heavy(module: str) -> None:
    at_import = {name.partition(".")[0] for name, for_types in imports(module) if not for_types}
    # rich may be imported by what draws with it, when it draws
    assert not at_import & (HEAVY - {"rich"})


def test_importing_the_hook_engine_loads_nothing_heavy() -> None:
    code = "import sys, hookline, hookline.engine.events, hookline.engine.plan, hookline.engine.explain, hookline.engine.hook; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()
    assert "hookline.engine.hook" in loaded


def test_making_a_hook_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom hookline import Hook, every, on, StopTraining\n"
        "class Mine(Hook):\n    @every('5 steps')\n    def on_step_end(self, loss): ...\n"
        "@on('step_end')\ndef report(step): ...\nMine()\nprint(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()


@pytest.mark.parametrize("name", hookline.__all__)
def test_every_public_name_is_there_with_its_doc(name: str) -> None:
    value = getattr(hookline, name)
    assert inspect.getdoc(value)
    assert name in dir(hookline)


def test_public_names_are_listed_once_for_everyone() -> None:
    """What is loaded when used, what `__all__` says and what type checkers see are the same names."""
    tree = ast.parse(NAMES["hookline"].read_text())
    seen_by_checkers = {
        alias.name
        for guard in tree.body
        if isinstance(guard, ast.If) and ast.unparse(guard.test) == "TYPE_CHECKING"
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen_by_checkers == set(hookline.__all__)
    assert len(hookline.__all__) == len(set(hookline.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        hookline.Trainr  # noqa: B018
    assert not hasattr(hookline, "nothing")


def test_every_module_says_what_it_is() -> None:
    # not imported: one acts when it is
    trees = {module: nodes(path.read_text())[0] for module, path in NAMES.items()}
    assert [module for module, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_files_are_short() -> None:
    long = {}
    for module, path in NAMES.items():
        text = path.read_text()
        if not text.startswith('"""Generated') and len(text.splitlines()) > LONGEST_FILE:
            long[module] = len(text.splitlines())
    assert not long


def test_functions_are_short() -> None:
    """In statements, which a formatter does not change."""
    long = {
        f"{module}.{node.name}": count
        for module, path in NAMES.items()
        for node in nodes(path.read_text())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (count := sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1) > LONGEST_FUNCTION
    }
    assert not long


# ---- no coupling by introspection -----------------------------------------------------------------------------------

INSIDE_A_FRAME = {
    "f_locals",
    "f_globals",
    "f_builtins",
    "f_lasti",
    "f_trace",
    "tb_lasti",
    "gi_frame",
    "cr_frame",
}
INSIDE_CODE = {
    "co_code",
    "_co_code_adaptive",
    "co_consts",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_lines",
    "co_positions",
    "co_exceptiontable",
}
FRAMES = {
    "_getframe",
    "_getframemodulename",
    "_current_frames",
    "currentframe",
    "getouterframes",
    "getinnerframes",
    "walk_stack",
    "walk_tb",
    "f_code",
    "f_back",
    "tb_frame",
}
READS_BYTECODE = {"dis", "opcode", "bytecode"}
SHOWS_A_STACK = {"hookline.reliability.stacks"}
"""The one module that looks at frames, for the file, the line and the function that a report shows."""


def introspection(source: str) -> set[str]:
    """What a source reads of the inside of frames and code objects, by attribute or by its name as text."""
    found: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name.partition(".")[0] for alias in node.names}
            found |= {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    return found & (INSIDE_A_FRAME | INSIDE_CODE | FRAMES | READS_BYTECODE)


def test_no_module_reads_local_variables_or_bytecode() -> None:
    wrong = {
        module: introspection(path.read_text()) - (FRAMES if module in SHOWS_A_STACK else set())
        for module, path in NAMES.items()
    }
    assert {module: found for module, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import dis",
        "from dis import opmap",
        "frame.f_locals['x']",
        "getattr(frame, 'f_locals')",
        "f.__code__.co_consts",
        "import sys\nsys._getframe(1)",
        "from inspect import currentframe",
        "code.co_code[frame.f_lasti]",
    ],
)
def test_reading_local_variables_or_bytecode_would_be_found(source: str) -> None:
    assert introspection(source)


# ---- one lifecycle ------------------------------------------------------------------------------------------------

RECOMPUTED = {
    "training_step": "an optimizer that recomputes the loss (LBFGS) runs the step again, inside its own step",
    "optimizer_zero_grad": "the same optimizer clears the gradients before it does",
}
"""Actions that are called at two places, and why."""


def emits(source: str) -> Iterator[str]:
    """The events that a source emits: calls of a plan's slots, and slots that are looked up for such a call."""
    names = {event.name for event in EVENT_ROWS}
    for node in nodes(source):
        if not isinstance(node, ast.Call):
            continue
        if (
            isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value).rpartition(".")[2].lstrip("_") == "plan"
        ):
            yield from {node.func.attr} & names
        elif isinstance(node.func, ast.Name) and node.func.id == "attrgetter":
            yield from {each.value for each in node.args if isinstance(each, ast.Constant)} & names


def test_every_event_is_emitted_at_one_place() -> None:
    places: dict[str, list[str]] = {}
    for module, path in NAMES.items():
        for event in emits(path.read_text()):
            places.setdefault(event, []).append(module)
    assert len(places) > 60, "few events are found: plans have another name by now"
    several = {
        event: modules
        for event, modules in places.items()
        if len(modules) > (2 if event in RECOMPUTED else 1)
    }
    assert several == {}


@pytest.mark.parametrize(
    "source", ["self.run.plan.on_step_end(s)", "plan.setup(s)", "attrgetter('on_test_start')"]
)
def test_a_second_emit_would_be_found(source: str) -> None:
    assert list(emits(source))


# ---- state has owners --------------------------------------------------------------------------------------------

MOST_FIELDS, MOST_WRITERS = 25, 3
PARTS = {
    "progress": "Progress",
    "saves": "Saves",
    "resume": "Resume",
    "identity": "Identity",
    "data": "RunData",
    "traits": "Traits",
    "manual": "Manual",
    "participants": "Participants",
    "signals": "ReceivedSignal",
    "run": "Run",
    "setup": "Setup",
    "counts": "Counts",
    "ending": "Ending",
    "current": "CurrentBatch",
    "optimization": "Optimization",
    "subject": "Subject",
    "s": "State",
    "state": "State",
}
"""What the parts of a run and of its state are called, and their classes."""
BY_EVERY_CALL = {
    "State.running": "each call that takes time publishes itself, for the watchdog: plan, filters and phases of the loop"
}
LARGER = {
    "hookline.run.options.Options": "the one declaration of all options",
    "hookline.run._arguments.OptionArguments": "the same options as arguments",
    "hookline.interop.model_training_framework.settings.LoggingConfig": "mirrors the schema of another package",
}
"""Classes that may have more fields, and why."""


def fields_of(node: ast.ClassDef) -> set[str]:
    """What instances of a class hold: annotated fields, slots, and what its methods set. Views of a fact are not held."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each in node.body:
            if not (isinstance(each.value, ast.Call) and ast.unparse(each.value.func) == "fact"):
                found.add(each.target.id)
        elif (
            isinstance(each, ast.Assign) and each in node.body and ast.unparse(each.targets[0]) == "__slots__"
        ):
            found |= {part.value for part in ast.walk(each.value) if isinstance(part, ast.Constant)}
        elif (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and ast.unparse(each.value) == "self"
        ):
            found.add(each.attr)
    return {str(each) for each in found}


def classes(*modules: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for module in modules or NAMES:
        yield from (
            (module, node) for node in nodes(NAMES[module].read_text()) if isinstance(node, ast.ClassDef)
        )


def test_no_class_is_a_bag_of_state() -> None:
    large = {
        f"{module}.{node.name}": len(fields_of(node))
        for module, node in classes()
        if len(fields_of(node)) > MOST_FIELDS
    }
    assert {name: count for name, count in large.items() if name not in LARGER} == {}


def test_few_modules_write_each_field_of_a_run_and_its_state() -> None:
    owners = ("hookline.run.parts", "hookline.run.run", "hookline.run.state", "hookline.run.state_parts")
    fields = {node.name: fields_of(node) for _, node in classes(*owners)}
    assert set(PARTS.values()) <= set(fields), "the parts have other names by now"
    writers: dict[str, set[str]] = {}
    for module, path in NAMES.items():
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = PARTS.get(ast.unparse(node.value).rpartition(".")[2], "")
                if node.attr in fields.get(owner, ()):
                    writers.setdefault(f"{owner}.{node.attr}", set()).add(module)
    for module, node in classes(
        "hookline.run.parts", "hookline.run.state_parts"
    ):  # what a part writes itself counts too
        for inner in ast.walk(node):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and ast.unparse(inner.value) == "self"
            ):
                writers.setdefault(f"{node.name}.{inner.attr}", set()).add(module)
    assert len(writers) > 60, "few fields are written: the parts have other names by now"
    assert {
        name: modules
        for name, modules in writers.items()
        if len(modules) > MOST_WRITERS and name not in BY_EVERY_CALL
    } == {}


def test_every_fact_that_a_part_owns_can_be_read_from_the_state() -> None:
    state = State()
    for name in WRITTEN:
        assert getattr(state, name) == getattr(state.owner(name), name)


def test_facts_are_read_only_for_hooks() -> None:
    for name in sorted(WRITTEN - {"cache", "extras", "log", "nested_validate", "running", "sanity_checking"}):
        with pytest.raises(AttributeError):
            setattr(State(), name, None)


def test_the_step_of_one_process_does_not_mention_ranks() -> None:
    text = NAMES["hookline.training.step"].read_text()
    assert not re.search(r"\brank|agreement|together|world_size|distributed", text.lower())
    assert len(text.splitlines()) <= 180


# ---- mirrored tests ------------------------------------------------------------------------------------------------

TESTS = Path(__file__).parent
WITH_LIGHTNING = {
    "adopted_callback": "callbacks",
    "adopted_module": "modules",
    "arguments": "trainer_callbacks",
    "binder": "forms",
    "callback_list": "trainer_callbacks",
    "callbacks": "facade",
    "checkpoint_file": "checkpoints",
    "closure_step": "forms",
    "connector": "metrics",
    "host": "odd_lightning",
    "loaders": "forms",
    "logged_values": "metrics",
    "loop_parts": "loops",
    "loop_trainer": "loops",
    "module_methods": "classes",
    "modules": "classes",
    "names": "habits",
    "package": "habits",
    "profiling": "trainer_callbacks",
    "progress": "loops",
    "rules": "same_weights",
    "table": "habits",
    "trainer": "users",
    "trainer_parts": "users",
    "trainer_settings": "loops",
    "trainer_view": "users",
    "tuning": "tuner",
}
"""Modules of interop/lightning whose behaviour is compared with the package: the file `tests/interop/test_lightning_*.py`."""
NOT_MIRRORED = {
    "__main__": "one call of cli.main",
    "_version": "one constant",
    "engine._methods": "generated from the table of events",
    "run._arguments": "generated from the options",
}
"""Modules without a test file of their own, and why. Take a module out when its file is there; add none."""


def mirrors(module: str) -> list[Path]:
    """`hookline.hooks._figures` -> `tests/hooks/test_figures.py`. Tests of `interop` that need no other package are in
    `tests/dialects`: `tests/interop` runs in an environment of its own.
    """
    path = NAMES[module].relative_to(SOURCE)
    name = f"test_{path.stem.strip('_')}.py"
    places = [TESTS / path.parent]
    if path.parts[0] == "interop":
        places.append(TESTS.joinpath("dialects", *path.parts[1:-1]))
    found = [place / name for place in places]
    if path.parts[:2] == ("interop", "lightning"):
        behaviour = WITH_LIGHTNING.get(path.stem, path.stem)
        found += [TESTS / "interop" / f"test_{start}{behaviour}.py" for start in ("lightning_", "hosts_")]
    return found


def test_every_module_has_a_mirrored_test_file() -> None:
    plain = [module for module, path in NAMES.items() if path.name != "__init__.py"]
    missing = {
        module.removeprefix("hookline.")
        for module in plain
        if not any(path.exists() and "\ndef test_" in path.read_text() for path in mirrors(module))
    }
    assert missing - set(NOT_MIRRORED) == set(), "add tests/PACKAGE/test_NAME.py that tests the module itself"
    assert set(NOT_MIRRORED) - missing == set(), (
        "these have one by now, or are gone: take them out of the list"
    )


# ---- figures of the whole --------------------------------------------------------------------------------------

MOST_FILES, MOST_ONE_IMPORTER = 390, 12
"""Modules, and short modules with a single importer. They go down; only a new capability adds a module."""
MOST_STATEMENTS = {
    "": 99,
    "audit": 430,
    "checkpoint": 3668,
    "cli": 2104,
    "config": 1688,
    "control": 784,
    "data": 3648,
    "digests": 1313,
    "distributed": 1543,
    "engine": 3266,
    "hooks": 7320,
    "interop": 10658,
    "loggers": 2114,
    "metrics": 544,
    "reliability": 967,
    "report": 1854,
    "rewind": 612,
    "run": 4934,
    "testing": 198,
    "tracing": 868,
    "training": 6809,
    "util": 840,
    "watch": 305,
}
"""Statements of each package, which no formatter changes. They go down; only a new capability adds to its package."""
SHORT = 60


def statements(module: str) -> int:
    return sum(isinstance(node, ast.stmt) for node in nodes(NAMES[module].read_text()))


def test_the_figures_of_the_whole_do_not_grow() -> None:
    importers: dict[str, set[str]] = {}
    for module in NAMES:
        for name in own_imports(module):
            importers.setdefault(name, set()).add(module)
    plain = [module for module, path in NAMES.items() if path.name != "__init__.py"]
    fragments = {
        module for module in plain if len(importers.get(module, ())) == 1 and statements(module) < SHORT
    }
    assert len(NAMES) <= MOST_FILES
    found = dict.fromkeys(MOST_STATEMENTS, 0)
    for module in NAMES:
        found[part(module) if part(module) in found else ""] += statements(module)
    assert {name: count for name, count in found.items() if count > MOST_STATEMENTS[name]} == {}
    assert len(fragments) <= MOST_ONE_IMPORTER, sorted(fragments)
