"""Traces on the command line: --trace, explain --from and --diff, trace, replay, and how a failed run says to go on."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import preloaded
import pytest

from hookline.cli import main

PARTS = """
import torch
from torch.nn import functional as F
from hookline import DataModule, Hook, Module, every

class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx): return F.mse_loss(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx): return self.training_step(batch, batch_idx)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(DataModule):
    def train_dataloader(self): return [(torch.ones(2, 4), torch.ones(2, 2))] * 4
    val_dataloader = train_dataloader

class Leaves(Hook):
    def on_step_end(self, trainer, step):
        if step == 3: trainer.disable_hook("leaves")

class Look(Hook):
    def __init__(self, above: int = 0) -> None: self.above = above
    def on_step_end(self, step, loss):
        if step > self.above: print("step", step, "loss", loss >= 0)

class Wants(Hook):
    def on_step_end(self, module): ...

class Quits(Hook):
    def __init__(self, token: str = "") -> None: ...
    def on_step_end(self, step):
        if step == 6: raise SystemExit(3)

class Fails(Hook):
    def on_step_end(self, step):
        if step == 6: raise RuntimeError("broken on purpose")
"""
RUN = """
module = "trace_parts.Net"
datamodule = "trace_parts.Data"
[trainer]
max_epochs = 2
seed = 1
enable_progress_bar = false
[hooks.leaves]
class_path = "trace_parts.Leaves"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with one traced run in it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "trace_parts.py").write_text(PARTS)
    (folder / "run.toml").write_text(RUN)
    (folder / "other.toml").write_text(RUN.replace("trace_parts.Leaves", "trace_parts.Look"))
    (folder / "fails.toml").write_text(
        RUN + '[hooks.fails]\nclass_path = "trace_parts.Fails"\n'
        "[hooks.model_checkpoint]\nevery_n_train_steps = 2\n"
    )
    path, here = list(sys.path), os.getcwd()
    os.chdir(folder)
    assert main(["fit", "run.toml", "--trace", "--trainer.run_dir", "run"]) == 0
    os.chdir(here)
    yield folder
    sys.path[:] = path
    sys.modules.pop("trace_parts", None)


@pytest.fixture(autouse=True)
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch, own_directory: None) -> None:
    monkeypatch.chdir(project)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_a_trace_is_written_into_the_runs_directory() -> None:
    records = json.loads(Path("run/trace.json").read_text())
    assert (
        sum(each["name"] == "on_step_end" and each["cat"] == "event" for each in records if "cat" in each)
        == 8
    )


def test_explain_shows_what_happened_beside_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "explain", "--from", "run/trace.json")
    assert "on_step_end · happened 8 times" in text
    assert "hook leaves: Leaves.on_step_end" in text and "called 3 times" in text
    assert (
        "hook leaves was called in on_step_end 3 of 8 times: the last at step 3"
        in text.partition("Not as planned:")[2]
    )


def test_explain_compares_a_configuration_with_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "explain", "fails.toml", "--from", "run/trace.json", "--json"))
    assert any("hook fails was never called in on_step_end" in each for each in found["differences"])
    assert found["events"]["on_step_end"] == 8


def test_explain_names_the_differences_of_two_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        said(capsys, "explain", "--diff", "run.toml", "run.toml").strip()
        == "The same settings; the same events reach the same listeners in the same order."
    )
    text = said(capsys, "explain", "--diff", "run.toml", "other.toml")
    assert (
        "on_step_end: hook leaves, function: Leaves.on_step_end in run.toml, Look.on_step_end in other.toml"
        in text
    )
    assert "asks: trainer, step in run.toml, step, loss in other.toml" in text
    assert json.loads(said(capsys, "explain", "--diff", "run.toml", "fails.toml", "--json"))["differences"]


def test_it_names_settings_that_no_listener_shows_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = '[hooks.gradient_monitor]\nlog_frequency = {}\nbudget = "{}"\n[hooks.webhook]\nurl = "https://example.org/{}"\n'
    Path("one.toml").write_text(RUN + monitor.format(10, "1%", "first-secret"))
    Path("two.toml").write_text(
        RUN.replace("seed = 1", "accumulate_grad_batches = 4") + monitor.format(500, "2%", "other-secret")
    )
    text = said(capsys, "explain", "--diff", "one.toml", "two.toml")
    for line in (
        "trainer.seed: 1 in one.toml, not set in two.toml",
        "trainer.accumulate_grad_batches: not set in one.toml, 4 in two.toml",
        "hooks.gradient_monitor.log_frequency: 10 in one.toml, 500 in two.toml",
        'hooks.gradient_monitor.budget: "1%" in one.toml, "2%" in two.toml',
        "hooks.webhook.url: (not shown) in one.toml, (not shown) in two.toml",
    ):
        assert line in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["explain"], "explain needs a configuration, --from TRACE, or --diff CONFIG CONFIG"),
        (
            ["explain", "run.toml", "--diff", "run.toml", "other.toml"],
            "takes two configurations and nothing else",
        ),
        (["explain", "--from", "run.toml"], "run.toml is not a trace of Hookline"),
        (["explain", "--from", "run"], "run is a directory; name a trace. There are: run/trace.json"),
        (["trace", "run/trac.json"], "There is no trace run/trac.json. Did you mean 'trace.json'?"),
        (["trace", "run/trace.json", "--out", "run.toml"], "run.toml exists and is not a trace"),
        (
            ["replay", "run/trace.json", "trace_parts:Loook"],
            "trace_parts has no 'Loook'. Did you mean 'Look'?",
        ),
        (["replay", "run/trace.json", "trace_parts:Look", "--set", "above"], "write it as NAME=VALUE"),
        (
            ["replay", "run/trace.json", "trace_parts:Look", "--set", "abov=3"],
            "Look has no parameter 'abov'. Did you mean 'above'?",
        ),
        (["replay", "run/trace.json", "trace_parts:Look", "--rank", "2"], "has no events of rank 2"),
    ],
)
def test_wrong_commands_are_told_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert why in said(capsys, *arguments, code=2)


def test_replay_plays_the_run_to_a_hook_and_says_what_it_would_have_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "replay", "run/trace.json", "trace_parts:Look", "--set", "above=6")
    assert text.splitlines()[:2] == ["step 7 loss True", "step 8 loss True"]
    assert "hook 'look' replayed a run of 8 steps" in text and "on_step_end: 8 calls" in text
    found = json.loads(
        said(capsys, "replay", "run/trace.json", "trace_parts.Look", "--set", "above=100", "--json")
    )
    assert (found["hook"], found["steps"], found["asked"]) == ("look", 8, [])


def test_replay_names_the_facts_that_were_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert "requests facts that were not recorded: 'module' in on_step_end" in said(
        capsys, "replay", "run/trace.json", "trace_parts:Wants", code=1
    )


def test_a_hook_that_fails_in_a_replay_is_a_failure_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "replay", "run/trace.json", "trace_parts:Fails", code=1)
    assert "raised by hook 'fails' in on_step_end" in text and "step 6" in text


def test_trace_says_what_is_in_a_file_and_puts_several_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "run/trace.json: fit, rank 0 of 1, up to step 8: " in said(capsys, "trace", "run/trace.json")
    out = str(tmp_path / "both.json")
    assert f"wrote {out}: " in said(capsys, "trace", "run/trace.json", "--out", out)
    assert json.loads(said(capsys, "trace", out, "--json"))[0]["step"] == 8


# ---- a run that dies ----------------------------------------------------------------------------------------------


def test_the_last_line_of_a_failed_run_is_the_command_that_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = said(
        capsys, "fit", "fails.toml", "--trainer.default_root_dir", str(tmp_path), code=1
    ).splitlines()[-4:]
    assert lines.pop().startswith("Model: ")
    assert (
        lines[0]
        == "Failed: RuntimeError: broken on purpose, in hook 'fails', on_step_end, epoch 1, batch 1, step 6, rank 0."
    )
    assert lines[1].startswith(f"Saved: {tmp_path}/runs/") and lines[1].endswith(
        "/checkpoints/last, at step 6."
    )
    command = shlex.split(lines[2].removeprefix("To resume: "))
    assert command[:2] == ["hookline", "fit"] and "--checkpoint" in command
    assert "fit completed at step 8" in said(capsys, *command[1:], "--hooks.fails", "false")


def test_an_error_of_hookline_ends_with_the_same_lines(capsys: pytest.CaptureFixture[str]) -> None:
    (Path("diverges.toml")).write_text(
        RUN + "[hooks.model_checkpoint]\nevery_n_train_steps = 2\n[optimizer]\n"
        'class_path = "SGD"\nlr = 1e30\n'
    )
    lines = said(capsys, "fit", "diverges.toml", "--trainer.run_dir", "diverged", code=1).splitlines()
    assert lines[0].startswith("hookline: The loss")
    assert lines[-2].startswith("  Failed: NonFiniteLoss: ")
    assert lines[-1] == "  Nothing was saved, so there is nothing to resume from."


def test_in_a_process_of_its_own_nothing_comes_after_it() -> None:
    done = preloaded.run(
        [sys.executable, "-m", "hookline", "fit", "fails.toml", "--trainer.run_dir", "died"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    *_, resume, model = done.stderr.splitlines()
    assert resume == "To resume: hookline fit fails.toml --trainer.run_dir=died"
    assert "died/checkpoints/last" in model and model.startswith("Model: ")


def test_a_hook_that_ends_the_process_does_not_end_it_without_a_word() -> None:
    Path("quits.toml").write_text(
        Path("fails.toml").read_text().replace("trace_parts.Fails", "trace_parts.Quits")
    )
    done = preloaded.run(
        [
            sys.executable,
            "-m",
            "hookline",
            "fit",
            "quits.toml",
            "--trainer.run_dir=quit",
            "--hooks.fails.token=word",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 3
    *_, failed, saved, _, _, command = done.stderr.splitlines()
    assert failed.startswith("Failed: SystemExit: 3, in hook 'fails', on_step_end, epoch 1, batch 1, step 6")
    assert saved == "Saved: quit/checkpoints/last, at step 6."
    assert command == "Or: hookline fit quits.toml --trainer.run_dir=quit --hooks.fails.token=..."
    records = [json.loads(line) for line in Path("quit/log.jsonl").read_text().splitlines()]
    assert [each["exception"] for each in records if each["type"] == "failure"] == ["SystemExit"]


def test_a_job_of_several_ranks_is_resumed_as_one() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "hookline",
            "fit",
            "fails.toml",
            "--trainer.run_dir=both",
            "--trainer.max_epochs=5",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (
        "torchrun --standalone --nproc-per-node 2 -m hookline fit fails.toml --trainer.run_dir=both"
        in done.stderr
    )
