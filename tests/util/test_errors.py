"""Errors say what, where and the right thing; signals are four objects that stay the same wherever they go."""

from __future__ import annotations

import copy
import pickle
import re
import tomllib
from pathlib import Path

import pytest
import torch
from tiny import Net, batches, quiet

import hookline
from hookline import (
    END_EPOCH,
    SKIP_BATCH,
    SKIP_STEP,
    STEP_DONE,
    Hook,
    HookError,
    HooklineError,
    LossError,
    NonFiniteLoss,
    OptionError,
    StopTraining,
)
from hookline.util.errors import (
    closest,
    described,
    folders_beside,
    folders_with,
    install_command,
    missing_package,
)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "True"),
        ("text", "'text'"),
        ([], "[]"),
        (torch.ones(2, 3), "Tensor (2, 3)"),
        (torch.tensor(1.0), "Tensor ()"),
        ([torch.ones(4), "label"], "list (Tensor (4,), str)"),
        ({"x": torch.ones(1)}, "dict ('x': Tensor (1,))"),
        (tuple(range(9)), "tuple (int, int, int, int, ...)"),
        ("x" * 200, "str"),
    ],
)
def test_a_large_value_is_described_by_what_it_is_and_a_small_one_shown(value, said):
    assert described(value) == said


@pytest.mark.parametrize("signal", [SKIP_BATCH, END_EPOCH, SKIP_STEP, STEP_DONE], ids=repr)
def test_a_signal_stays_the_same_object_through_copies_and_pickles(signal):
    assert copy.copy(signal) is signal
    assert copy.deepcopy({"decision": signal})["decision"] is signal
    assert pickle.loads(pickle.dumps(signal)) is signal


def test_a_copied_signal_still_steers_the_loop():
    trainer = quiet()
    trainer.on("train_batch_start")(lambda: copy.deepcopy(SKIP_BATCH))
    trainer.fit(Net(), batches(2))
    assert trainer.state.batches_seen == 0


def test_closest_suggests_a_near_name_and_nothing_for_a_far_one():
    assert closest("grad_nrom", ["loss", "grad_norm"]) == " Did you mean 'grad_norm'?"
    assert closest("zzz", ["loss", "grad_norm"]) == ""
    assert closest("loss", []) == ""


class Misspelt(Hook):
    def on_train_strat(self): ...


class NoLoss(Net):
    def training_step(self, batch, batch_idx):
        return 1.0


class NotANumber(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float("nan")


@pytest.mark.parametrize(
    ("kind", "builtin", "run"),
    [
        (HookError, Exception, lambda: quiet(hooks=[Misspelt()])),
        (OptionError, ValueError, lambda: quiet(max_epochs="many")),
        (LossError, Exception, lambda: quiet().fit(NoLoss(), batches(1))),
        (NonFiniteLoss, ArithmeticError, lambda: quiet().fit(NotANumber(), batches(2))),
    ],
    ids=["HookError", "OptionError", "LossError", "NonFiniteLoss"],
)
def test_one_except_clause_catches_every_error_about_hookline(kind, builtin, run):
    with pytest.raises(HooklineError) as caught:
        run()
    assert type(caught.value) is kind
    assert isinstance(caught.value, builtin)


def test_a_request_to_stop_is_no_error():
    assert not issubclass(StopTraining, HooklineError)
    assert StopTraining("plateau").reason == "plateau"
    assert StopTraining().reason


def test_folders_beside_a_path_can_be_suggested(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "log.txt").write_text("")
    assert folders_beside(tmp_path / "rums") == ["runs"]
    assert folders_beside(tmp_path / "nowhere" / "rums") == []


def test_folders_with_a_file_are_found_two_levels_below(tmp_path: Path) -> None:
    for folder in ("a", "b/c", "d/e/f"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "log.jsonl").write_text("")
    assert folders_with(tmp_path, "log.jsonl") == [str(tmp_path / "a"), str(tmp_path / "b" / "c")]


def test_an_error_about_a_missing_package_names_an_extra_that_exists_in_one_form() -> None:
    assert install_command("plots") == 'pip install "hookline[plots]"'
    assert missing_package("WandB", "wandb", "wandb") == (
        "WandB needs the package 'wandb': pip install \"hookline[wandb]\""
    )
    source = Path(hookline.__file__).parent
    texts = {path: path.read_text() for path in source.rglob("*.py") if path.name != "errors.py"}
    assert not [path for path, text in texts.items() if re.search(r"pip install \W?hookline\[", text)]
    called = r"(?:install_command\(|missing_package\([^()]*, )[\"']([a-z-]+)[\"']\)"
    named = {extra for text in texts.values() for extra in re.findall(called, text)}
    named |= {
        extra for text in texts.values() for extra in re.findall(r'^    extra = "(\w+)"', text, re.MULTILINE)
    }
    offered = tomllib.loads((source.parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert len(named) > 10 and named <= offered.keys(), named
