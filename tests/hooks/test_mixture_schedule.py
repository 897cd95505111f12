"""MixtureSchedule: other weights from a step, a number of tokens or an epoch on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Hook, Mixture, OptionError
from hookline.hooks import MixtureSchedule
from hookline.util.errors import HooklineError

DATA = {"web": batches(4), "code": batches(4)}


def mixture(order: Any = "weighted", **settings: Any) -> Mixture:
    return Mixture(order, {"web": 1, "code": 1}, **{"epoch_length": 12, "window": 2, **settings})


class Names(Hook):
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.seen = ""

    def on_train_batch_end(self, trainer: Any, dataloader_name: str, batches_seen: int) -> None:
        self.seen += dataloader_name[0]
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"after-{batches_seen}")


def fit(phases: Any, resume: Any = None, folder: Path | None = None, **options: Any) -> str:
    names = Names(folder)
    quiet(hooks=[names, MixtureSchedule(phases)], **options).fit(
        Net(), DATA, mixture=mixture(), resume=resume
    )
    return names.seen


ONLY_WEB, ONLY_CODE = {"web": 1, "code": 0}, {"web": 0, "code": 1}


@pytest.mark.parametrize(
    "phases",
    [
        {0: ONLY_WEB, 4: ONLY_CODE},
        {"0 steps": ONLY_WEB, "4 steps": ONLY_CODE},
        {0: ONLY_WEB, "48 tokens": ONLY_CODE},
        {0: ONLY_WEB, "4": ONLY_CODE},
        {0: ONLY_WEB, 3: ONLY_CODE},
    ],
    ids=str,
)
def test_a_phase_begins_at_its_step_or_tokens_and_holds_from_the_next_window(phases: Any) -> None:
    assert fit(phases) == "wwww" + "c" * 8  # a batch has 12 tokens, a window 2 batches


def test_a_phase_may_begin_with_an_epoch() -> None:
    assert fit({"0 epochs": ONLY_WEB, "1 epoch": ONLY_CODE}, max_epochs=2) == "w" * 12 + "c" * 12


def test_names_that_a_phase_does_not_give_keep_their_weight() -> None:
    assert fit({4: {"web": 0}})[4:] == "c" * 8


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 11])
def test_after_a_resume_the_phases_continue(cut: int, tmp_path: Path) -> None:
    phases = {0: ONLY_WEB, 4: {"web": 1, "code": 3}, "9": ONLY_CODE}
    whole = fit(phases, folder=tmp_path)
    assert fit(phases, resume=tmp_path / f"after-{cut}") == whole[cut:]


@pytest.mark.parametrize("cut", [11, 12, 13, 24])
def test_a_phase_that_is_due_when_the_epoch_begins_is_not_lost_in_a_resume(cut: int, tmp_path: Path) -> None:
    phases = {0: ONLY_WEB, "1 epoch": ONLY_CODE, "2 epochs": ONLY_WEB}
    whole = fit(phases, folder=tmp_path, max_epochs=3)
    assert whole == "w" * 12 + "c" * 12 + "w" * 12
    assert fit(phases, resume=tmp_path / f"after-{cut}", max_epochs=3) == whole[cut:]


def test_a_trainer_can_be_used_again() -> None:
    names = Names()
    trainer = quiet(hooks=[names, MixtureSchedule({0: ONLY_WEB, 4: ONLY_CODE})])
    for _ in range(2):
        trainer.fit(Net(), DATA, mixture=mixture())
    assert names.seen == ("wwww" + "c" * 8) * 2


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        ({}, "must map times to weights"),
        ([1], "must map times to weights"),
        ({"1 hour": ONLY_WEB}, "a phase: '1 hour' is not a moment"),
        ({-1: ONLY_WEB}, "-1 is no"),
        ({True: ONLY_WEB}, "True is not a moment"),
        ({1.5: ONLY_WEB}, "1.5 is not a moment"),
        ({"soon": ONLY_WEB}, "soon"),
        ({"0 bananas": ONLY_WEB}, "unknown unit 'bananas'"),
        ({"5 steps": ONLY_WEB, "9 tokens": ONLY_CODE}, "choose one of these units"),
        ({9: ONLY_WEB, 5: ONLY_CODE}, "in the order of their times"),
        ({5: ONLY_WEB, "5 steps": ONLY_CODE}, "each later"),
        ({5: "web"}, "web"),
        ({5: {}}, "names no loader"),
        ({5: {"web": -1}}, "-1"),
        ({5: {"web": "much"}}, "much"),
    ],
    ids=str,
)
def test_phases_that_make_no_sense_are_refused_when_they_are_written(phases: Any, text: str) -> None:
    with pytest.raises(HooklineError, match=text):
        MixtureSchedule(phases)


@pytest.mark.parametrize(
    ("phases", "settings", "text"),
    [
        (
            {0: {"wbe": 1}},
            mixture(),
            "the phase at 0 steps is not possible.*names 'wbe'.*Did you mean 'web'.*Loaders: web, code",
        ),
        ({3: {"web": 0, "code": 0}}, mixture(), "all weights are 0"),
        ({3: {"web": 1}}, Mixture(), "order='round_robin' does not use weights"),
    ],
    ids=str,
)
def test_phases_that_do_not_fit_the_run_are_refused_before_the_first_batch(
    phases: Any, settings: Any, text: str
) -> None:
    names = Names()
    with pytest.raises(OptionError, match=text):
        quiet(hooks=[names, MixtureSchedule(phases)]).fit(Net(), DATA, mixture=settings)
    assert names.seen == ""


def test_a_run_with_one_loader_has_nothing_to_schedule() -> None:
    with pytest.raises(HooklineError, match="does not mix training loaders"):
        quiet(hooks=[MixtureSchedule({5: ONLY_WEB})]).fit(Net(), batches(2))


def test_validation_alone_does_not_mind_it() -> None:
    assert "val/loss" in quiet(hooks=[MixtureSchedule({5: ONLY_WEB})]).validate(Net(), batches(2))
