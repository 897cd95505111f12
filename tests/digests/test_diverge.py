"""The result in words and as data: runs, attempts, ranks, logs, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diverge.planted import AtStepEnd, Net, nudge, samples
from tiny import quiet
from torch.nn.functional import mse_loss

import hookline
from hookline import Hook, OptionError
from hookline.digests.diverge import diverge, diverge_attempts, diverge_ranks


def train(folder: str, hooks: Any = (), resume: Any = None, **options: Any) -> None:
    torch.manual_seed(3)
    given: dict[str, Any] = {"seed": 1, "digest": True, "logger": True, "control": False, **options}
    quiet(run_dir=folder, hooks=list(hooks), **given).fit(Net(), samples(), resume=resume)


def test_the_text_says_the_step_the_kind_and_what_else_differs() -> None:
    train("a")
    train("b", [AtStepEnd(4, nudge("last.bias"))], audit=True)
    report = hookline.diverge("a", "b")
    lines = report.text().splitlines()
    assert lines[0] == "A and B diverge at step 4: hook."
    assert lines[1] == "  what    hook 'at_step_end' changed parameters (last.bias) in on_step_end of B"
    assert lines[3:6] == [
        "  before  step 3 is equal",
        "  where   epoch 0, after 3 batches",
        "  then    weights, loss, gradient, clipping, update",
    ]
    assert any(line.startswith("  hooks.at_step_end.class: nothing in A,") for line in lines)
    data = report.data()
    assert data["equal"] is False and data["divergence"]["step"] == 4 and data["divergence"]["kind"] == "hook"
    assert data["steps"] == [1, 6] and data["compared"] == "digests"


def test_equal_runs_say_how_much_was_compared() -> None:
    train("a")
    train("b", max_steps=4)
    report = diverge("a", "b")
    assert report.text().splitlines()[0] == "A and B are equal: 4 digests of steps 1 to 4."
    assert report.is_equal and report.data()["divergence"] is None
    assert any(each["key"] == "options.max_steps" for each in report.causes)


def test_without_digests_the_logs_are_compared_and_the_result_says_so() -> None:
    for folder, hooks in (("a", []), ("b", [AtStepEnd(4, nudge("last.bias"))])):
        train(folder, hooks, digest=False, log_every_n_steps=1)
    report = diverge("a", "b")
    assert report.basis == "log" and report.divergence is not None
    assert (report.divergence.last_equal, report.divergence.step) == (3, 4)
    assert "only the logged metrics are compared, because A and B have no digests" in report.text()
    train("c", digest=False, logger=False, checkpoint=True)
    with pytest.raises(
        OptionError, match="The runs cannot be compared: A and C have no digests.*writes digests"
    ):
        diverge("a", "c", ("A", "C"))


@pytest.mark.parametrize("digest", [True, False])
def test_evaluations_after_the_fit_are_not_compared_with_the_training(digest: bool) -> None:
    sgd, data = partial(torch.optim.SGD, lr=0.1), samples()
    for folder, later in (("a", data[:3]), ("b", data[3:])):
        torch.manual_seed(3)
        trainer = quiet(
            run_dir=folder, seed=1, digest=digest, logger=True, control=False, log_every_n_steps=1
        )
        trainer.fit(net := torch.nn.Linear(4, 2), data, data[:2], loss=mse_loss, optimizer=sgd)
        trainer.validate(net, later, loss=mse_loss)
        trainer.test(net, later, loss=mse_loss)
    report = diverge("a", "b")
    assert report.is_equal and report.divergence is None
    note = "the trainings are equal; evaluations after the fit differ: val/loss "
    assert any(each.startswith(note) for each in report.notes)


class Saves(Hook):
    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 3:
            trainer.save_checkpoint("saved")


def test_a_resume_that_differs_is_found() -> None:
    train("run", [Saves()])
    train("run", [AtStepEnd(5, nudge("first.bias"))], resume="saved")
    report = diverge_attempts("run")
    assert report.divergence is not None and report.names == ("attempt 1", "attempt 2")
    assert (report.divergence.step, report.divergence.first.kind) == (5, "weights")
    train("whole")
    again = diverge_attempts("whole")
    assert again.is_equal and "the run was never resumed and never went back" in again.text()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: diverge("run", "run"),
            "Both runs are run. `hookline diverge RUN` compares a run with its own resume",
        ),
        (lambda: diverge("run", "missing"), "There is no run at missing"),
        (lambda: diverge("run", "."), "is not the directory of a run.*There are runs below it: plain, run"),
        (lambda: diverge_ranks("run"), "has digests of 1 rank. `--ranks` compares the ranks"),
        (lambda: diverge_attempts("plain"), "has no digests.jsonl: the run was not digested"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_can(call: Any, said: str) -> None:
    train("run")
    train("plain", digest=False)
    with pytest.raises(OptionError, match=said):
        call()


def test_sharded_ranks_are_not_compared() -> None:
    train("run", digest=True)
    text = Path("run/digests.jsonl").read_text().replace("SingleDevice", "FSDP")
    Path("run/digests.jsonl").write_text(text)
    Path("run/digests.rank1.jsonl").write_text(text)
    with pytest.raises(OptionError, match="FSDP: each rank holds another part of the weights"):
        diverge_ranks("run")


def test_after_the_last_common_digest_the_logs_decide() -> None:
    train("a", digest=4, log_every_n_steps=1)
    train("b", [AtStepEnd(6, nudge("last.bias"))], digest=4, log_every_n_steps=1)
    found = diverge("a", "b").divergence
    assert found is not None and (found.last_equal, found.step, found.first.kind) == (5, 6, "metric")
    train("c", [AtStepEnd(3, nudge("last.bias"))], digest=5, log_every_n_steps=1)  # only step 1 is in both
    found = diverge("a", "c").divergence
    assert found is not None and (found.last_equal, found.step, found.first.kind) == (2, 3, "metric")
    train("d", digest=5, log_every_n_steps=3)
    report = diverge("a", "d")
    assert report.is_equal and "A has digests up to step 4, B up to step 5; only steps" in report.text()


def test_logs_without_a_metric_in_common_cannot_be_compared() -> None:
    train("a", digest=False, log_every_n_steps=1)
    train("b", digest=False, log_every_n_steps=1)
    log = Path("b/log.jsonl")
    log.write_text(log.read_text().replace("loss", "other").replace('"lr"', '"rate"'))
    with pytest.raises(OptionError, match="cannot be compared"):
        diverge("a", "b")
