"""A checkpoint that was written before runs could have several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint.older_run import Net, run

from hookline import load_weights
from hookline.checkpoint.files import verify

OLDER = Path(__file__).with_name("older")


def test_an_older_checkpoint_is_whole_and_its_run_continues_to_the_same_end(tmp_path: Path) -> None:
    verify(OLDER)
    whole, resumed = run(tmp_path / "whole"), run(tmp_path / "resumed", resume=OLDER)
    assert resumed.state.batches_seen == 12 and resumed.state.samples_seen == 48
    assert resumed.metrics["error_epoch"] == pytest.approx(
        whole.metrics["error_epoch"], rel=1e-4
    )  # of another machine
    for name, value in whole.module.state_dict().items():
        assert torch.allclose(resumed.module.state_dict()[name], value, atol=1e-5), name


def test_an_older_checkpoint_gives_its_weights() -> None:
    assert load_weights(Net(), OLDER).complete
