"""What a hook asks of an object it is given, as far as its code tells."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.engine.source_text import attributes_read, parse_source, passes_arguments_on


class Base(Hook):
    def on_fit_start(self, trainer: Any) -> None:
        trainer.of_the_base()


class Asks(Base):
    def on_train_start(self, trainer: Any) -> None:
        trainer.here = trainer.there.further

    def on_train_end(self, state: Any, other: Any) -> None:
        state.trainer.stop()
        other.elsewhere()
        if hasattr(state.trainer, "maybe"):
            state.trainer.maybe()


def asked(hook: Any, base: type = Hook) -> list[tuple[str, str]]:
    return list(attributes_read(("trainer", "state.trainer"), hook, lambda cls: cls is base))


def test_what_is_read_is_told_with_its_method_and_what_is_set_or_asked_about_first_is_not() -> None:
    assert asked(Asks(), Base) == [("there", "Asks.on_train_start"), ("stop", "Asks.on_train_end")]


def test_classes_are_read_down_to_the_base() -> None:
    assert asked(Asks())[-1] == ("of_the_base", "Base.on_fit_start")


def test_a_class_without_source_is_passed_over() -> None:
    made = type("Made", (Base,), {"on_train_end": lambda self, trainer: trainer.unseen})
    assert asked(made()) == [("of_the_base", "Base.on_fit_start")]


def test_a_method_that_changes_its_arguments_does_not_pass_them_on() -> None:
    class Base:
        def step(self, *given: Any) -> None:
            pass

    class Whole(Base):
        def step(self, *given: Any) -> None:
            super().step(*given)

    class Shorter(Base):
        def step(self, *given: Any) -> None:
            super().step(*given[:-1])

    assert passes_arguments_on(Whole.step, "step")
    assert not passes_arguments_on(Shorter.step, "step")
    assert not passes_arguments_on(Base.step, "step")


def test_code_made_by_exec_does_not_have_the_text_of_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ["import sys\n", "print(sys.path)\n"]  # as Python 3.13 keeps that of `python -c`
    monkeypatch.setitem(linecache.cache, "<string>", (30, None, other, "<string>"))
    space: dict[str, Any] = {}
    exec("def step(self, *given):\n    return super(Made, self).step(*given)\n", space)
    assert parse_source(space["step"]) is None
    assert passes_arguments_on(space["step"], "step")


def test_a_wrapper_that_refers_to_itself_is_a_method_as_any_other() -> None:
    def report(self: Any, step: int) -> None: ...

    def counted(function: Any) -> Any:
        def wrapper(self: Any, step: int) -> None:
            wrapper.calls += 1  # type: ignore[attr-defined]
            function(self, step)

        wrapper.calls = 0  # type: ignore[attr-defined]
        return wrapper

    class Counts(Hook):
        on_step_end = counted(report)

    quiet(hooks=[Counts()]).fit(Net(), batches(3))
    assert Counts.on_step_end.calls == 3
