"""Averaged weights in a checkpoint: loading takes those that were scored, says so, and takes others if asked to."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.torchrun import torchrun
from safetensors.torch import load_file
from tiny import Net, batches, quiet
from torch import nn

from hookline import Module, OptionError, Trainer, load_weights
from hookline.checkpoint import files
from hookline.cli import main
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.weight_averaging import WeightAveraging

BEST = "run/checkpoints/best"


def trained(
    net: Module | None = None, hook: WeightAveraging | None = None, **options: Any
) -> tuple[Trainer, WeightAveraging]:
    """A run that keeps the best checkpoint by the validation loss, which is that of the averaged weights."""
    hook = hook or WeightAveraging(decay=0.9)
    best = ModelCheckpoint("val/loss", filename="best")
    trainer = quiet(run_dir="run", hooks=[hook, best], max_epochs=3, **options)
    trainer.fit(net or Net(), batches(4), batches(2))
    return trainer, hook


def score(net: Module, **options: Any) -> float:
    return float(quiet(**options).validate(net, batches(2))["val/loss"])


def best_score() -> float:
    return float(files.read_manifest(BEST)["monitor"]["score"])


def test_what_is_loaded_has_the_score_that_the_checkpoint_was_kept_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained()
    assert score(Net.load_from_checkpoint(BEST)) == best_score()
    assert "averaged weights of hook 'weight_averaging'" in caplog.text and "weights='raw'" in caplog.text
    caplog.clear()
    report = load_weights(net := Net(), BEST)
    assert score(net) == best_score()
    assert report.weights == "averaged" and report.step == 12
    assert (
        "step 12, averaged weights" in str(report)
        and "averaged weights of hook 'weight_averaging'" in caplog.text
    )


def test_the_other_weights_can_be_asked_for() -> None:
    trained()
    raw = files.read(BEST)["module"]
    averages = files.read(BEST)["hooks"]["weight_averaging"]["averages"]
    for asked, expected in (("raw", raw), ("averaged", averages), ("scored", averages)):
        report = load_weights(net := Net(), BEST, weights=asked)
        assert torch.equal(net.layer.weight, expected["layer.weight"]), asked
        assert report.weights == ("raw" if asked == "raw" else "averaged")
        assert torch.equal(
            Net.load_from_checkpoint(BEST, weights=asked).layer.weight, expected["layer.weight"]
        )
    with pytest.raises(
        OptionError, match=r"weights='averged', allowed: 'scored', 'raw', 'averaged'.*Did you mean 'averaged'"
    ):
        load_weights(Net(), BEST, weights="averged")


def test_export_writes_the_scored_weights_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    averages, raw = files.read(BEST)["hooks"]["weight_averaging"]["averages"], files.read(BEST)["module"]
    assert main(["checkpoint", "export", BEST, "net.safetensors"]) == 0
    out = capsys.readouterr().out
    assert "step 12" in out and "the averaged weights of hook 'weight_averaging'" in out
    assert torch.equal(load_file("net.safetensors")["layer.weight"], averages["layer.weight"])
    assert main(["checkpoint", "export", BEST, "raw.safetensors", "--weights", "raw", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["weights"], said["hook"], said["step"]) == ("raw", None, 12)
    assert torch.equal(load_file("raw.safetensors")["layer.weight"], raw["layer.weight"])
    assert main(["checkpoint", "export", BEST, "x.pt", "--weights", "raw", "--hook", "weight_averaging"]) == 2
    assert "--hook" in capsys.readouterr().err
    assert main(["checkpoint", "show", BEST]) == 0
    assert "averaged by hook 'weight_averaging'" in capsys.readouterr().out


def test_an_average_that_evaluations_did_not_use_is_not_the_scored_one() -> None:
    trained(hook=WeightAveraging(decay=0.9, use_for_evaluation=False))
    report = load_weights(net := Net(), BEST)
    assert report.weights == "raw" and score(net) == best_score()
    averages = files.read(BEST)["hooks"]["weight_averaging"]["averages"]
    load_weights(net, BEST, weights="averaged")
    assert torch.equal(net.layer.weight, averages["layer.weight"])


def test_an_average_that_has_not_begun_is_not_taken() -> None:
    trained(hook=WeightAveraging(start="100 steps"))
    assert load_weights(net := Net(), BEST).weights == "raw" and score(net) == best_score()
    with pytest.raises(OptionError, match="does not contain averaged weights"):
        load_weights(Net(), BEST, weights="averaged")


def test_where_there_is_no_average_nothing_is_said_and_asking_for_one_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quiet(run_dir="run", hooks=[ModelCheckpoint()]).fit(Net(), batches(4))
    caplog.clear()
    report = load_weights(net := Net(), next(Path("run/checkpoints").iterdir()))
    assert report.weights == "raw" and "averaged" not in str(report) and caplog.text == ""
    for source in ("run", {"layer.weight": net.layer.weight}):
        with pytest.raises(
            OptionError, match="does not contain averaged weights|has only one set of weights"
        ):
            load_weights(Net(), source, weights="averaged")


def test_evaluating_a_checkpoint_without_the_hook_gives_its_score_too() -> None:
    trained()
    assert (
        float(quiet(run_dir="run").validate(Net(), batches(2), checkpoint=BEST)["val/loss"]) == best_score()
    )
    with_hook = quiet(run_dir="run", hooks=[WeightAveraging(decay=0.9)])
    assert float(with_hook.validate(Net(), batches(2), checkpoint=BEST)["val/loss"]) == best_score()


def test_training_continues_from_the_trained_weights() -> None:
    whole, _ = trained()
    raw = {name: each.clone() for name, each in whole.module.state_dict().items()}  # type: ignore[union-attr]
    again = quiet(
        run_dir="run",
        hooks=[WeightAveraging(decay=0.9), ModelCheckpoint("val/loss", filename="best")],
        max_epochs=3,
    )
    again.fit(net := Net(), batches(4), batches(2), resume="auto")
    assert all(torch.equal(each, raw[name]) for name, each in net.state_dict().items())


def without_note(path: str) -> None:
    """As an earlier version wrote it."""
    contents, about = files.read(path), files.read_manifest(path)
    del contents["scored_weights"]
    known = (
        "run",
        "step",
        "epoch",
        "epochs_seen",
        "batches_seen",
        "reason",
        "monitor",
        "metrics",
        "status",
        "world_size",
    )
    files.write(contents, Path(path), {name: about[name] for name in known})


def test_an_older_checkpoint_that_does_not_say_it_gives_the_average_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained()
    without_note(BEST)
    assert load_weights(net := Net(), BEST).weights == "averaged" and score(net) == best_score()
    assert "does not say which weights were scored" in caplog.text and "weights='raw'" in caplog.text


def test_an_argument_of_that_name_is_the_modules_own() -> None:
    class Weighted(Net):
        def __init__(self, weights: str = "none") -> None:
            super().__init__()
            self.weights = weights

    trained(Weighted())
    assert Weighted.load_from_checkpoint(BEST, weights="imagenet").weights == "imagenet"
    assert Weighted.load_from_checkpoint(BEST).weights == "none"


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(4, 2)
        self.twin.weight = self.layer.weight


def test_tied_weights_stay_tied(caplog: pytest.LogCaptureFixture) -> None:
    _, hook = trained(Tied())
    load_weights(net := Tied(), "run")
    assert net.twin.weight is net.layer.weight and torch.equal(
        net.layer.weight, hook.averages["layer.weight"]
    )


def test_two_averages_that_would_both_be_evaluated_are_refused() -> None:
    hooks = [WeightAveraging(decay=0.9), WeightAveraging(decay=0.5)]
    with pytest.raises(OptionError, match="use_for_evaluation=False"):
        quiet(hooks=hooks).fit(Net(), batches(4), batches(2))


SHARDED = """
import torch
from tiny import Net, batches, quiet
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.weight_averaging import WeightAveraging

torch.manual_seed(1)
trainer = quiet(run_dir="run", strategy="fsdp", device="cpu", max_epochs=3,
                hooks=[WeightAveraging(decay=0.9), ModelCheckpoint("val/loss", filename="best")])
trainer.fit(Net(), batches(4), batches(2))
"""


def test_sharded_averages_are_loaded_whole(caplog: pytest.LogCaptureFixture) -> None:
    done = torchrun(SHARDED, Path.cwd())
    assert done.code == 0, done.output
    with caplog.at_level(logging.WARNING):
        load_weights(net := Net(), BEST)
    contents = files.read(BEST)
    assert torch.equal(net.layer.weight, contents["hooks"]["weight_averaging"]["averages"]["layer.weight"])
    assert not torch.equal(net.layer.weight, contents["module"]["layer.weight"])
