"""Hooks of a dialect among Hookline's: arguments by position under any name, further facts by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dialects.forged import Heard
from tiny import Net, batches, quiet

from hookline import EVENTS, every
from hookline.interop.adapter import Row
from hookline.interop.kempnerforge import StepContext, TrainingHook


def test_parameters_may_have_any_name_as_they_come_in_the_documented_order() -> None:
    got: list[Any] = []

    class Renamed(TrainingHook):
        def on_train_begin(self, cfg: Any) -> None:
            got.append(cfg)

        def on_step_end(self, context: StepContext) -> None:
            got.append(context.step)

        def on_eval_end(self, results: dict[str, float], at: int) -> None:
            got.append((sorted(results), at))

        def on_train_end(self, *counters: int) -> None:
            got.append(counters)

    quiet(hooks=[Renamed()], config="job").fit(Net(), batches(2), batches(1))
    assert got == ["job", 1, 2, (["eval/loss", "eval/perplexity"], 2), (2, 24)]


def test_further_facts_may_be_asked_for_by_name_and_filters_work() -> None:
    got: list[Any] = []

    class More(TrainingHook):
        def on_train_begin(self, model: Any, config: Any) -> None:
            got.append((type(model).__name__, config))

        @every("2 steps")
        def on_step_end(self, ctx: StepContext, rank: int) -> None:
            got.append((ctx.step, rank))

    quiet(hooks=[More()], config="job").fit(Net(), batches(5))
    assert got == [("Net", "job"), (2, 0), (4, 0)]


def test_an_overridden_method_may_call_the_one_it_overrides() -> None:
    class Louder(Heard):
        def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
            super().on_eval_end({**metrics, "eval/extra": 1.0}, step=step)
            super().on_checkpoint_save(step, "somewhere")
            TrainingHook.on_eval_end(self, metrics, step)

    hook = Louder()
    quiet(hooks=[hook]).fit(Net(), batches(1), batches(1))
    assert ("eval", ["eval/extra", "eval/loss", "eval/perplexity"], 1) in hook.heard
    assert ("save", 1, "somewhere") in hook.heard


def test_a_method_from_a_class_beside_is_heard_too() -> None:
    class Mixin:
        def on_eval_end(self, metrics: Any, step: int) -> None:
            self.seen = metrics

    class Both(Mixin, TrainingHook): ...

    hook = Both()
    quiet(hooks=[hook]).fit(Net(), batches(1), batches(1))
    assert sorted(hook.seen) == ["eval/loss", "eval/perplexity"]


def test_a_static_method_and_a_function_set_on_the_instance_are_called_too() -> None:
    got: list[Any] = []

    class Static(TrainingHook):
        @staticmethod
        def on_eval_end(results: Any, at: int) -> None:
            got.append((sorted(results), at))

    hook = Static()
    hook.on_train_end = lambda *counters: got.append(counters)  # type: ignore[method-assign]
    quiet(hooks=[hook]).fit(Net(), batches(2), batches(1))
    assert got == [(["eval/loss", "eval/perplexity"], 2), (2, 24)]


def test_a_method_that_only_takes_keywords_gets_the_facts_of_its_event_as_hookline_has_them() -> None:
    got: list[Any] = []

    class Keywords(TrainingHook):
        def on_eval_end(self, **facts: Any) -> None:
            got.append((facts["step"], sorted(facts["metrics"])))

    quiet(hooks=[Keywords()]).fit(Net(), batches(1), batches(1))
    assert got == [(1, ["val/loss"])]


def test_a_method_bound_in_order_gets_the_documented_arguments_whatever_its_parameters_are_called() -> None:
    got: list[Any] = []

    def on_epoch_end(step: int, logs: Any) -> int:  # `step` is also a fact
        got.append((step, logs))
        return 1

    row = Row("on_train_epoch_end", ("epoch", "state"), {"state": lambda s: s.cache})
    call = row.bind_in_order(on_epoch_end, EVENTS).call
    assert call(SimpleNamespace(epoch=3, step=70, cache="logs")) is None
    assert got == [(3, "logs")]


def test_a_row_that_is_not_for_the_sanity_check_is_not_called_in_it() -> None:
    got: list[Any] = []
    row = Row("on_validation_end", ("epoch",), in_sanity_check=False)
    call = row.bind(lambda number: got.append(number), EVENTS["on_validation_end"], EVENTS, "here").call
    call(SimpleNamespace(epoch=0, sanity_checking=True))
    call(SimpleNamespace(epoch=1, sanity_checking=False))
    assert got == [1]
