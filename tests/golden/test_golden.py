"""What earlier versions have written is read by this one, exactly. `make.py` says where the golden files come from."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.on_two_ranks import GOLDEN, checkpoint, versions
from golden.training import (
    ONE_PROCESS,
    TWO_RANKS,
    Net,
    by_hand,
    differences,
    facts,
    fit,
    loader,
    logged,
    one_device,
    plain,
    resolved,
)
from ranks.torchrun import cases

from hookline import Hook, Trainer, load_weights
from hookline.checkpoint.export import export_weights
from hookline.checkpoint.files import read, read_manifest, verify
from hookline.cli import main
from hookline.hooks import WeightAveraging
from hookline.loggers import read_log
from hookline.report import write_report
from hookline.tracing.replay import replay

CASES = [
    (version, name) for version in versions() for name in ONE_PROCESS if (GOLDEN / version / name).is_dir()
]
RANKS = [
    (version, name) for version in versions() for name in TWO_RANKS if (GOLDEN / version / name).is_dir()
]
CHECKPOINTS = sorted(
    str(each.parent.relative_to(GOLDEN)) for each in GOLDEN.glob("v*/*/run/checkpoints/*/manifest.json")
)


def expected(version: str, name: str) -> Any:
    return json.loads((GOLDEN / version / name / "expected.json").read_text())


def copied(version: str, name: str) -> Path:
    """The golden run in the directory of this test, where it may be written to."""
    return Path(shutil.copytree(GOLDEN / version / name / "run", "run"))


def test_there_are_golden_files_of_every_kind() -> None:
    kinds = {each.parent.name for each in GOLDEN.glob("v*/*/expected.json")}
    assert kinds == {*ONE_PROCESS, *TWO_RANKS, "by-hand", "log", "config"}


@pytest.mark.parametrize("path", CHECKPOINTS)
def test_a_golden_checkpoint_is_whole(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    verify(GOLDEN / path)
    assert main(["checkpoint", "verify", str(GOLDEN / path)]) == 0
    assert main(["checkpoint", "show", str(GOLDEN / path)]) == 0
    assert f"step {read_manifest(GOLDEN / path)['step']}" in capsys.readouterr().out


# ---- checkpoints of one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "name"), CASES)
def test_a_golden_run_is_resumed_with_its_whole_state_and_ends_as_if_never_interrupted(
    version: str, name: str
) -> None:
    trainer, record, loaded = ONE_PROCESS[name]("run", resume=checkpoint(copied(version, name).parent))
    wanted = expected(version, name)
    assert not differences(wanted["restored"], loaded)
    final = wanted["final"]
    if name == "adam":  # its steps are not exact; which samples came when is
        seen, wanted_seen = plain(record.seen), final["hooks"]["record"]["seen"]
        assert [each[:4] for each in seen if each[0] != "validated"] == [
            each[:4] for each in wanted_seen if each[0] != "validated"
        ]
        final = {key: final[key] for key in ("counters", "random")}
    assert not differences(final, facts(trainer))
    assert trainer.status == "completed"


@pytest.mark.parametrize("name", ["one-device", "averaged"])
@pytest.mark.parametrize("version", versions())
def test_a_golden_run_is_resumed_from_its_best_checkpoint_which_was_saved_right_after_a_validation(
    version: str, name: str
) -> None:
    (best,) = (copied(version, name) / "checkpoints").glob("epoch=*")
    trainer = ONE_PROCESS[name]("run", resume="best" if name == "one-device" else best)[
        0
    ]  # the other run was stopped: it is over
    assert not differences(expected(version, name)["final"], facts(trainer))


@pytest.mark.parametrize("version", versions())
def test_a_golden_loop_by_hand_continues_to_the_same_end(version: str) -> None:
    wanted = expected(version, "by-hand")
    line, _, loaded = by_hand("run", resume=checkpoint(copied(version, "by-hand").parent))
    assert not differences(wanted["restored"], loaded)
    final = {name: value for name, value in wanted["final"].items() if name != "random"}
    assert not differences(final, facts(line))


@pytest.mark.parametrize("version", versions())
def test_auto_finds_the_newest_golden_checkpoint_and_the_logs_continue_without_a_trace_of_the_failure(
    version: str,
) -> None:
    copied(version, "one-device")
    resumed = one_device("run", resume="auto")[0]
    assert not differences(expected(version, "one-device")["final"], facts(resumed))
    one_device("whole")
    of_run, of_whole = (
        [
            (each["step"], each["over"], plain(each["metrics"]))
            for each in read_log(run)
            if each["type"] == "metrics"
        ]
        for run in ("run", "whole")
    )
    assert of_run == of_whole
    assert any(each.get("superseded") is True for each in read_log("run", superseded=True))
    assert Path("run/metrics.csv").read_text() == Path("whole/metrics.csv").read_text()
    assert json.loads(Path("run/run.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("version", versions())
def test_golden_weights_are_read_without_a_trainer(version: str, tmp_path: Path) -> None:
    for name in ("one-device", "window", "adam"):
        path, wanted = checkpoint(GOLDEN / version / name), expected(version, name)["restored"]["weights"]
        net = Net(dtype=torch.float32 if name == "adam" else torch.float64)
        assert load_weights(net, path).complete
        assert plain(dict(net.state_dict())) == wanted
    made = Net.load_from_checkpoint(checkpoint(GOLDEN / version / "one-device"))
    assert (
        made.width == 3
        and plain(dict(made.state_dict())) == expected(version, "one-device")["restored"]["weights"]
    )
    export_weights(checkpoint(GOLDEN / version / "one-device"), tmp_path / "weights.safetensors")
    load_weights(net := Net(), tmp_path / "weights.safetensors")
    assert plain(dict(net.state_dict())) == expected(version, "one-device")["restored"]["weights"]


@pytest.mark.parametrize("version", versions())
def test_the_best_golden_checkpoint_has_the_score_of_its_averaged_weights(version: str) -> None:
    (best,) = (GOLDEN / version / "averaged" / "run" / "checkpoints").glob("epoch=*")
    net = Net()
    net.load_state_dict(
        {**net.state_dict(), **read(best)["hooks"]["weight_averaging"]["averages"]}, strict=False
    )
    net.again = net.layer
    measured = Trainer(logger=False, enable_progress_bar=False, device="cpu").validate(
        net, loader(8, 100, False)
    )
    assert float(measured["val/loss"]) == read_manifest(best)["monitor"]["score"]


# ---- checkpoints of two ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank found when it resumed each golden checkpoint of two ranks, from one launch."""
    return cases("golden.on_two_ranks", tmp_path_factory.mktemp("job"), 110)


@pytest.mark.parametrize(("version", "name"), RANKS)
def test_two_ranks_resume_a_golden_checkpoint_of_two_ranks_exactly(
    version: str, name: str, on_two_ranks: Any
) -> None:
    wanted = expected(version, name)
    for at in ("restored", "final"):
        for rank in range(2):
            assert not differences(wanted[at][rank], on_two_ranks[f"{version} {name} {at}"][rank]), (at, rank)


@pytest.mark.parametrize(("version", "name"), RANKS)
def test_one_process_resumes_a_golden_checkpoint_of_two_ranks(version: str, name: str) -> None:
    path, wanted = checkpoint(GOLDEN / version / name), expected(version, name)["restored"]
    averages = WeightAveraging(decay=0.5)
    _, record, loaded = fit(
        "run", [averages], path, accumulate_grad_batches=4, train=loader(48), max_epochs=1
    )
    for part in ("weights", "optimizers", "schedulers"):
        assert not differences(wanted[0][part], loaded[part])
    assert not differences(wanted[0]["hooks"]["weight_averaging"], loaded["hooks"]["weight_averaging"])
    seen = [sample for rank in wanted for each in rank["hooks"]["record"]["seen"] for sample in each[2]]
    assert Counter(seen + record.samples(after=3)) == Counter(range(48))


# ---- a run's log, trace and record --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions())
def test_a_golden_log_is_read_with_what_a_resume_has_superseded_left_out(version: str) -> None:
    run, wanted = copied(version, "log"), expected(version, "log")
    assert plain(list(read_log(run))) == wanted["records"]
    everything = list(read_log(run, superseded=True))
    assert plain(everything) == wanted["all records"]
    assert {each["type"] for each in everything} >= {
        "hyperparams",
        "metrics",
        "text",
        "histogram",
        "skip",
        "failure",
        "resume",
        "control",
        "cost",
        "end",
    }
    assert (
        len([each for each in everything if each.get("superseded") is True and each["type"] == "metrics"])
        == 2
    )


@pytest.mark.parametrize("version", versions())
def test_a_page_is_made_of_a_golden_run(version: str) -> None:
    path, (run,) = write_report([copied(version, "log")])
    assert run.last_step == expected(version, "log")["record"]["step"]
    page = path.read_text()
    assert all(each in page for each in ("train/error_step", "val/loss", "once upon a time", "eventful"))
    assert main(["report", "run"]) == 0


@pytest.mark.parametrize("version", versions())
def test_a_golden_trace_is_explained_and_replayed(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = copied(version, "log") / "trace.json"
    rows = [each for each in expected(version, "log")["all records"] if each.get("over") == "step"]
    assert main(["explain", "--from", str(trace)]) == 0
    batches = len(rows) + 2  # an update was skipped, and a batch failed
    assert f"training_step · happened {batches} times" in capsys.readouterr().out

    class Heard(Hook):
        def __init__(self) -> None:
            self.steps: list[Any] = []

        def on_step_end(self, step: int, loss: float) -> None:
            self.steps.append([step, loss.hex()])

    replay(trace, hook := Heard())
    assert hook.steps == [[each["step"], each["metrics"]["train/loss"]] for each in rows]
    assert main(["trace", str(trace)]) == 0


@pytest.mark.parametrize("version", versions())
def test_a_golden_run_that_was_completed_is_not_trained_again_and_gives_its_last_weights(
    version: str,
) -> None:
    copied(version, "log")
    trainer, record, _ = logged("run", resume="auto")
    wanted = expected(version, "log")
    assert [each for each in record.seen if each[0] != "validated"] == wanted["seen"]
    assert plain(dict(trainer.module.state_dict())) == wanted["final"]["weights"]
    assert not differences(wanted["final"]["counters"], facts(trainer)["counters"])
    left = json.loads(Path("run/run.json").read_text())
    assert {name: left[name] for name in ("id", "status", "step", "epochs")} == {
        name: wanted["record"][name] for name in ("id", "status", "step", "epochs")
    }


# ---- configurations -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["toml", "yaml"])
@pytest.mark.parametrize("version", versions())
def test_a_golden_configuration_means_what_it_meant(
    version: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(GOLDEN / version / "config", "config")
    monkeypatch.chdir("config")
    monkeypatch.setattr(sys, "path", list(sys.path))  # a configuration's folder is put in front of it
    monkeypatch.delitem(sys.modules, "golden_model", raising=False)
    try:
        assert not differences(expected(version, "config"), resolved(f"run.{kind}"))
    finally:
        sys.modules.pop("golden_model", None)


def test_a_difference_of_one_bit_is_found() -> None:
    wanted = {"a": [plain(0.1)], "b": plain(torch.tensor([0.5]))}
    assert not differences(wanted, {**wanted, "c": 1})
    assert differences(wanted, {**wanted, "a": [plain(math.nextafter(0.1, 1))]}) == [
        ".a[0]: expected '0x1.999999999999ap-4', found '0x1.999999999999bp-4'"
    ]
    assert differences(wanted, {"a": [plain(0.1)]}) == [".b is missing"]
