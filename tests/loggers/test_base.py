"""Several loggers as one, or none at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, Logger
from hookline.loggers import BadValue, JSONLines, Loggers, base

CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("log_metrics", ({"a": 1.0}, 1, 0)),
    ("log_hyperparams", ({"lr": 0.1},)),
    ("add_scalar", ("a", 1.0, 1)),
    ("add_histogram", ("a", torch.zeros(3), 1)),
    ("add_text", ("a", "text", 1)),
    ("add_image", ("a", torch.zeros(1, 2, 2), 1)),
    ("add_figure", ("a", object(), 1)),
    ("close", ()),
    ("open", (Path,)),
    ("position", ()),
    ("resume", (None, 1, 0, "checkpoint")),
    ("log_event", ("skip", {"reason": "hook"})),
    ("begin_afresh", ()),
    ("discard", ()),
    ("log_artifact", (Path(__file__), "a", "table", {"rows": 1}, ("newest",))),
    ("has_logged", ("id", Path())),
]


class Spy(Logger):
    """Remembers which of its methods were called, with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in dict(CALLS):
            return lambda *given, **named: self.calls.append((name, (*given, *named.values())))
        return super().__getattribute__(name)


@pytest.mark.parametrize(("method", "given"), CALLS, ids=[name for name, _ in CALLS])
def test_everything_reaches_every_logger_and_a_plain_logger_takes_everything(
    method: str, given: tuple[Any, ...]
) -> None:
    spies = [Spy(), Spy()]
    together = Loggers([spies[0], Logger(), spies[1]])
    getattr(together, method)(*given)
    assert spies[0].calls == spies[1].calls == [(method, given)]
    assert not getattr(Loggers(), method)(*given)


def test_no_public_method_of_a_logger_is_forgotten_by_the_group() -> None:
    public = {name for name, value in vars(Logger).items() if not name.startswith("_") and callable(value)}
    assert public <= set(vars(Loggers))
    assert public == set(dict(CALLS))


def test_what_is_held_is_logged_in_order_as_it_was_when_released_and_never_when_closed() -> None:
    spy, values, params = Spy(), torch.zeros(3), {"lr": [0.1]}
    group = Loggers([spy])
    group.hold()
    group.log_hyperparams(params)
    group.add_histogram("a", values, 1)
    group.log_row({"a": 1.0}, 1, 0, "step")
    values += 1
    params["lr"].append(0.2)
    assert not spy.calls
    group.release()
    group.add_text("a", "now", 1)
    assert [name for name, _ in spy.calls] == ["log_hyperparams", "add_histogram", "log_metrics", "add_text"]
    assert spy.calls[0][1] == ({"lr": [0.1]},) and not spy.calls[1][1][1].any()
    group.hold()
    group.add_text("a", "refused", 1)
    group.close()
    group.release()
    group.add_text("a", "later", 1)
    assert [given for name, given in spy.calls if name == "add_text"][1:] == [("a", "later", 1)]


def test_a_group_is_true_only_if_it_has_a_member() -> None:
    assert Loggers([Logger()]) and not Loggers()


def test_the_module_can_use_its_experiment_even_without_a_logger() -> None:
    class Draws(Net):
        def on_after_backward(self) -> None:
            self.experiment.add_histogram(
                tag="grad", values=self.layer.weight.grad, global_step=self.global_step
            )
            self.logger.add_text("note", "hello")

    quiet().fit(Draws(), batches(1))  # nothing to hear it, and nothing breaks
    spy = Spy()
    quiet(logger=spy).fit(Draws(), batches(1))
    assert {"add_histogram", "add_text"} <= {name for name, _ in spy.calls}


def test_hooks_get_the_loggers_as_logger_and_as_experiment() -> None:
    class Draws(Hook):
        def on_step_end(self, logger: Any, experiment: Any, step: int) -> None:
            assert logger is experiment
            experiment.add_scalar("mine", 1.0, step)

    spy = Spy()
    quiet(logger=spy, hooks=[Draws()]).fit(Net(), batches(2))
    assert [given for name, given in spy.calls if name == "add_scalar"] == [
        ("mine", 1.0, 1),
        ("mine", 1.0, 2),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_loggers_are_opened_and_closed_once_per_run_whatever_happens(fails: bool) -> None:
    class Opens(Logger):
        events: list[str] = []

        def open(self, run_dir: Callable[[], Path]) -> None:
            self.events.append("open")

        def close(self) -> None:
            self.events.append("close")

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fails:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    logger = Opens()
    logger.events = []
    try:
        quiet(logger=logger).fit(Fails(), batches(1))
    except RuntimeError:
        assert fails
    assert logger.events == ["open", "close"]


class Fails(Logger):
    """Breaks on its first row."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self.calls.append("log_metrics")
        raise OSError("disk full")

    def close(self) -> None:
        self.calls.append("close")
        raise OSError("disk full")


def test_a_logger_that_fails_is_reported_once_and_neither_the_run_nor_the_others_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Fails(), Spy()
    trainer = quiet(logger=[bad, good], log_every_n_steps=1)
    trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3
    assert bad.calls == ["log_metrics", "close"]  # it may still hold a file
    assert sum(name == "log_metrics" for name, _ in good.calls) == 4 and good.calls[-1][0] == "close"
    assert [record.message for record in caplog.records] == [
        "Fails failed in log_metrics and is switched off for this run"
    ]
    assert "disk full" in caplog.text
    trainer.validate(Net(), batches(1))
    assert bad.calls == ["log_metrics", "close"] * 2  # the next run tries again


class Counts(Logger):
    """Its position is how many rows it has had; remembers what it was told when a run continued."""

    queued = False

    def __init__(self) -> None:
        self.rows, self.told = 0, list[Any]()

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self.rows += 1

    def position(self) -> Any:
        return self.rows

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        self.told.append((position, step, epoch, Path(path).name))


class Other(Counts):
    pass


def saved_after_two(logger: Any, **options: Any) -> Path:
    trainer = quiet(logger=logger, log_every_n_steps=1, run_dir="mine", **options)
    trainer.on("step_end", every=2)(lambda: trainer.save_checkpoint())
    trainer.fit(Net(), batches(3))
    return Path("mine/checkpoints/step-2")


def test_a_logger_of_ones_own_gets_its_position_back_whoever_came_or_went() -> None:
    path = saved_after_two([Other(), Counts(), Logger(), Counts()])
    first, second, third = Counts(), Counts(), Counts()
    other = Other()
    quiet(logger=[first, Logger(), second, third, other], run_dir="mine").fit(Net(), batches(3), resume=path)
    assert first.told == second.told == other.told == [(2, 2, 0, "step-2")]
    assert third.told == [(None, 2, 0, "step-2")]  # there was no third of them
    first.told.clear()
    quiet(logger=first, run_dir="mine").fit(Net(), batches(1))
    quiet(logger=first, run_dir="mine").validate(Net(), batches(1), checkpoint=path)
    assert not first.told  # neither a new run nor an evaluation continues from anywhere


@pytest.mark.parametrize(
    "answer",
    [OSError("disk full"), BadValue("odd"), object(), {"a": {1, 2}}],
    ids=lambda each: type(each).__name__,
)
def test_a_logger_that_cannot_tell_its_position_spoils_no_checkpoint(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(Counts):
        def position(self) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    good = Counts()
    path = saved_after_two([Bad(), good])
    assert [record.message for record in caplog.records] == [
        "Bad failed in position and is switched off for this run"
    ]
    quiet(logger=[Bad(), good], run_dir="mine").fit(Net(), batches(3), resume=path)
    assert good.told == [(2, 2, 0, "step-2")]


def test_a_logger_that_fails_when_a_run_continues_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Counts):
        def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
            raise BadValue("odd")

    path = saved_after_two([Bad(), Other()])
    caplog.clear()
    bad, good = Bad(), Other()
    trainer = quiet(logger=[bad, good], log_every_n_steps=1, run_dir="mine")
    trainer.fit(Net(), batches(3), resume=path)
    assert trainer.global_step == 3 and good.told and good.rows and not bad.rows
    assert [record.message for record in caplog.records] == [
        "Bad failed in resume and is switched off for this run"
    ]


def test_ctrl_c_in_a_logger_is_still_ctrl_c() -> None:
    class Interrupted(Logger):
        def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Loggers([Interrupted()]).add_text("a", "b")


def test_a_wrong_image_is_the_callers_mistake_and_switches_no_logger_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = Loggers([JSONLines(tmp_path / "log.jsonl")])
    with pytest.raises(BadValue, match=r"'x' takes an image of shape .* not a Tensor of shape \(2, 4, 4\)"):
        group.add_image("x", torch.zeros(2, 4, 4))
    group.add_text("x", "still here")
    group.close()
    assert "still here" in (tmp_path / "log.jsonl").read_text() and not caplog.records


def test_the_group_has_the_first_client_of_its_members() -> None:
    class Talks(Logger):
        @property
        def client(self) -> Any:
            return "raw"

    assert Loggers().client is Loggers([Logger()]).client is None
    assert Loggers([Logger(), Talks()]).client == "raw"


def test_histograms_and_images_are_made_ready_for_a_client() -> None:
    row = base.histogram_row("h", [1.0, 2.0, float("nan")], lambda np_histogram: np_histogram)
    assert row["h"][0].sum() == 2 and row["h/nonfinite"] == 1
    assert base.histogram_row("h", [], dict) == {}
    assert base.flat_pixels("i", torch.zeros(1, 2, 3)).shape == (2, 3)
    assert base.flat_pixels("i", torch.zeros(3, 2, 3)).shape == (2, 3, 3)


def test_values_are_made_plain() -> None:
    nested = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], 3: True, "huge": 10**400, "text": "x\ud800"}
    assert base.flat_params(nested) == {
        "a/b": 1,
        "a/c/d": "None",
        "e": "[1, 2]",
        "3": True,
        "huge": str(10**400),
        "text": "x\\ud800",
    }
    assert base.pixels("x", torch.tensor([[0.0, 0.5], [2.0, math.nan]])).squeeze().tolist() == [
        [0, 127],
        [255, 0],
    ]
    assert base.pixels("x", torch.tensor([[0, 300], [-5, 7]])).squeeze().tolist() == [[0, 255], [0, 7]]
    assert base.finite_values("x", torch.tensor([1.0, math.nan, math.inf]))[1] == 2
    names = {base.file_name(tag, 1, "png") for tag in ("a/b", "a b", "../a_b", "")}
    assert len(names) == 4 and not any("/" in name or name.startswith(".") for name in names)


def test_a_direct_logger_that_holds_up_the_training_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Logger):
        queued = False

        def log_metrics(self, metrics: Any, step: int, epoch: int) -> None:
            pass

    monkeypatch.setattr(base, "SLOW_CALL", -1.0)
    loggers = Loggers([Slow()])
    loggers.log_metrics({}, 1, 0)
    loggers.log_metrics({}, 2, 0)
    assert caplog.text.count("Slow took 0.0 s in log_metrics and holds up the training") == 1


def test_a_member_can_join_for_a_part_of_a_run_and_is_called_directly() -> None:
    class Rows(Logger):
        tells_rows_apart = True

        def __init__(self) -> None:
            self.rows: list[tuple[str, int]] = []

        def log_metrics(self, metrics: Any, step: int, epoch: int, over: str = "") -> None:  # type: ignore[override]
            self.rows.append((over, step))

    for given in (False, [Logger()]):
        rows = Rows()

        class Joins(Hook):
            def on_train_metrics(self) -> None:
                """Make the run write rows, also without a logger."""

            def on_train_start(self, logger: Loggers) -> None:
                logger.add(rows)  # noqa: B023

            def on_train_end(self, logger: Loggers) -> None:
                logger.remove(rows)  # noqa: B023

        trainer = quiet(logger=given, hooks=[Joins()], log_every_n_steps=2)
        trainer.fit(Net(), batches(4), batches(1))
        assert rows.rows == [("step", 2), ("step", 4), ("evaluation", 4), ("epoch", 4)]
        assert rows not in trainer.loggers.members and bool(trainer.loggers) is bool(given)
