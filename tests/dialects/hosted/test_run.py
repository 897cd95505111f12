"""A run that another loop drives: its module, its place among ranks, its end, its rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects.looped import Counts, net_and_sgd, recorder, train
from tiny import batches
from torch import nn

import hookline
from hookline import Hook, Line
from hookline.hooks import GradientMonitor, JSONLog, LRMonitor, ModelCheckpoint
from hookline.run.lock import is_running


def test_the_module_is_the_user_s_own_whatever_runs_it() -> None:
    net, sgd = net_and_sgd()
    line = Line(torch.compile(net, backend="eager"), sgd)
    assert line.module is net and line.state.wrapped_model is not net


def test_a_line_takes_its_place_from_the_launcher_as_the_trainer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_ID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    s = Line(*net_and_sgd()).state
    assert (s.rank, s.local_rank, s.world_size) == (3, 1, 4)
    monkeypatch.setenv("RANK", "abc")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(hookline.OptionError, match="RANK='abc', which is not a whole number"):
        Line(*net_and_sgd())


def test_a_process_that_turns_out_to_be_another_rank_hears_what_is_meant_for_that_one(tmp_path: Path) -> None:
    class First(Hook):
        ranks = "zero"

        def setup(self) -> None:
            pytest.fail("this is rank 1")

    heard = recorder(["setup"])
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[First(), heard], logger=True, run_dir=tmp_path)
    line.set_rank(1, 1, 2)
    train(line, net, sgd, batches(1))
    assert heard.seen == ["setup"]
    assert not list(tmp_path.iterdir())  # there is one record of a run, rank zero's


def test_two_loops_at_once_do_not_write_into_one_directory(tmp_path: Path) -> None:
    lines = [Line(*net_and_sgd(), logger=logger, run_dir=tmp_path) for logger in (True, True, False)]
    with lines[0] as writes, lines[2]:  # the third one writes nothing
        assert is_running(writes.run_dir)
        with pytest.raises(hookline.RunLockedError, match="another fit of this process"), lines[1] as other:
            other.save_checkpoint()
    assert is_running(tmp_path) is None


def test_a_loop_that_fails_is_told_to_everyone_and_keeps_its_error() -> None:
    class Fails(Hook):
        def on_exception(self, exception: BaseException) -> None:
            raise ValueError("in the hook")

    heard = recorder(
        ["on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_exception", "on_fit_end", "teardown"]
    )
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[Fails(), heard])
    with pytest.raises(ZeroDivisionError) as error, line:
        for _ in line.epoch(batches(3)):
            1 / 0  # noqa: B018
    assert heard.seen == ["on_exception", "teardown"]
    assert line.status == "error"
    assert any("in the hook" in each for each in error.value.__notes__)


def test_ctrl_c_stays_what_it_is() -> None:
    heard = recorder(["on_exception", "on_train_end", "teardown"])
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    with pytest.raises(KeyboardInterrupt), line:
        raise KeyboardInterrupt
    assert heard.seen == ["on_exception", "teardown"] and line.status == "interrupted"


def test_a_set_up_that_fails_tears_down_whoever_was_set_up() -> None:
    class Broken(Hook):
        def setup(self) -> None:
            raise ValueError("no disk")

    heard = recorder(["setup", "on_train_start", "on_exception", "teardown"])
    net, sgd = net_and_sgd()
    with pytest.raises(ValueError, match="no disk"), Line(net, sgd, hooks=[heard, Broken()]):
        pytest.fail("the loop must not run")
    assert heard.seen == ["setup", "on_exception", "teardown"]


def test_a_loader_whose_length_is_not_implemented_is_one_of_unknown_length() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter(batches(2))

        def __len__(self) -> int:
            raise NotImplementedError

    net, sgd = net_and_sgd()
    line, seen = Line(net, sgd), list[Any]()
    with line:
        seen += [line.num_training_batches for _ in line.epoch(Endless())]
    assert seen == [None, None]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("sgd", "str"),
        (3, "int"),
        (torch.optim.SGD, "SGD, a class"),
        ([nn.Linear(1, 1)], "Linear"),
        (nn.Linear(1, 1).parameters(), "Parameter"),
    ],
)
def test_something_else_than_an_optimizer_is_refused_when_it_is_given(given: Any, name: str) -> None:
    with pytest.raises(hookline.OptionError, match=f"torch.optim.Optimizer.*not {name}"):
        Line(nn.Linear(4, 2), given)


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(hookline.OptionError, match=r"torch.nn.Module, not SGD"):
        Line(net_and_sgd()[1], net_and_sgd()[0])  # type: ignore[arg-type]


def test_a_loop_that_has_nothing_left_to_train_says_so(caplog: pytest.LogCaptureFixture) -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd)
    for _ in range(2):
        caplog.clear()
        with line, caplog.at_level(logging.WARNING, "hookline"):
            for _ in line.epochs(1):
                pass
            line.state.counts.epochs_seen = 1
    assert "Nothing is left to train: 1 epoch is done" in caplog.text


# ---- rows and records ------------------------------------------------------------------------------------------


def test_model_checkpoint_keeps_the_best(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    hook = ModelCheckpoint(monitor="val/loss", save_top_k=1)
    line = Line(net, sgd, hooks=[hook], run_dir=tmp_path)
    train(line, net, sgd, batches(3), epochs=3, val=batches(1))
    assert Path(hook.best_model_path).is_dir()
    best = nn.Linear(4, 2)
    hookline.load_weights(best, hook.best_model_path)
    assert torch.equal(best.weight, net.weight)  # it got better every time


def test_rows_go_to_loggers_and_hooks_may_edit_them(tmp_path: Path) -> None:
    class Adds(Hook):
        def on_train_metrics(self, metrics: Any) -> None:
            if "train/loss" in metrics:  # what hooks log at on_step_end is a row of its own
                metrics["twice"] = 2 * metrics["train/loss"]

    net, sgd = net_and_sgd()
    line = Line(
        net,
        sgd,
        hooks=[Adds(), LRMonitor(), GradientMonitor(log_frequency=1), JSONLog()],
        logger=True,
        run_dir=tmp_path,
        log_every_n_steps=1,
    )
    train(line, net, sgd, batches(2), val=batches(1))
    rows = [json.loads(each) for each in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    seen = {key for row in rows for key in (row.get("metrics") or row)}
    assert {"train/loss", "twice", "lr", "lr-SGD", "grad_norm", "val/loss"} <= seen
    assert list((tmp_path / "logs").glob("*.jsonl"))


def test_a_line_s_log_says_what_each_row_is_over(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, logger=True, run_dir=tmp_path, log_every_n_steps=1)
    train(line, net, sgd, batches(2), val=batches(1))
    rows = [json.loads(each) for each in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["over"] for row in rows if row["type"] == "metrics"] == [
        "step",
        "step",
        "evaluation",
        "epoch",
    ]


def test_what_hooks_cost_is_accounted_for() -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[Counts()])
    train(line, net, sgd, batches(6))
    assert [(row.hook, row.event, row.calls) for row in line.cost()] == [("counts", "on_step_end", 2)]
    assert "counts" in str(line.explain())
