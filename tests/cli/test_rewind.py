"""`hookline rewind`: a step of a recorded run, seen again by a probe or at a prompt."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
from cli.configured import said
from ranks.torchrun import environment
from rewind.rewound_runs import tree
from servers import serving

from hookline.cli import main

MODEL = """
from pathlib import Path
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from hookline import DataModule, Hook, Module

class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return F.mse_loss(F.dropout(self.layer(batch[0]), 0.5), batch[1])
    def configure_optimizers(self): return torch.optim.Adam(self.parameters(), lr=0.1)

class Data(DataModule):
    def train_dataloader(self):
        draw = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(32, 4, generator=draw), torch.randn(32, 2, generator=draw))
        return DataLoader(data, 4, shuffle=True)

class Fails(Hook):
    def on_before_optimizer_step(self, step):
        if step == 9: raise ArithmeticError("a bad batch")

class Posts(Hook):
    def on_step_end(self): Path("posted").touch()

class HasToken(Hook):
    def __init__(self, api_key: str) -> None: ...
"""
RUN = """
module = "rewound_model.Net"
datamodule = "rewound_model.Data"
[trainer]
max_epochs = 2
seed = 1
run_dir = "runs/a"
log_every_n_steps = 1
enable_progress_bar = false
[hooks.model_checkpoint]
every_n_train_steps = 5
save_top_k = -1
[hooks.weight_averaging]
[hooks.posts]
class_path = "rewound_model.Posts"
"""
PROBE = """
from hookline import Hook

class Probe(Hook):
    def on_step_end(self, step, loss, trainer):
        print("probe at step", step)
        trainer.log("probe/loss", loss)

class Changes(Hook):
    def on_step_end(self, module): module.layer.weight.data.zero_()
"""


@pytest.fixture(scope="module")
def rewound_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with a run in runs/a, and a failed one in runs/failed."""
    folder, path, here = tmp_path_factory.mktemp("project"), list(sys.path), os.getcwd()
    (folder / "rewound_model.py").write_text(MODEL)
    (folder / "run.toml").write_text(RUN)
    (folder / "probe.py").write_text(PROBE)
    os.chdir(folder)
    assert main(["fit", "run.toml"]) == 0
    failing = ["--hooks.fails", "rewound_model.Fails", "--trainer.run_dir", "runs/failed"]
    assert main(["fit", "run.toml", *failing]) == 1
    (folder / "posted").unlink()
    os.chdir(here)
    yield folder
    sys.path[:] = path
    sys.modules.pop("rewound_model", None)


@pytest.fixture(autouse=True)
def in_project(rewound_project: Path, monkeypatch: pytest.MonkeyPatch, own_directory: None) -> Path:
    monkeypatch.chdir(rewound_project)
    return rewound_project


def test_a_probe_sees_the_steps_and_what_it_logs_is_printed(
    capsys: pytest.CaptureFixture[str], in_project: Path
) -> None:
    before = tree(in_project / "runs")
    text = said(capsys, "rewind", "a", "--to", "8", "--with", "probe.py:Probe", "--without", "posts")
    assert text.startswith("probe at step 6\nprobe at step 7\nprobe at step 8\n")
    assert "rewound runs/a to step 8: 3 updates from runs/a/checkpoints/epoch=0-step=5 (step 5)" in text
    assert "step  probe/loss\n6     " in text
    assert "Compared with the log: 6 values of steps 6 to 8, equal to the bit." in text
    assert "Left out: model_checkpoint (it acts outside of the training), posts (it was excluded)." in text
    assert not (in_project / "posted").exists()
    data = json.loads(said(capsys, "rewind", "runs/a", "--to", "3", "--with", "probe.py:Probe", "--json"))
    assert data["from"] == {"step": 0, "checkpoint": None} and data["step"] == 3
    assert [each["step"] for each in data["logged"]] == [1, 2, 3]
    assert data["compared"] == {"values": 6, "steps": [1, 2, 3]} and data["differences"] == []
    assert tree(in_project / "runs") == before


def test_values_that_differ_have_an_exit_code_of_their_own(
    capsys: pytest.CaptureFixture[str], in_project: Path
) -> None:
    assert main(["rewind", "a", "--to", "8", "--with", "probe.py:Changes"]) == 3
    out = capsys.readouterr().out
    assert "The probe changes was detached, because it has changed in on_step_end" in out
    assert "DIFFERENT from the log: 2 of 6 values" in out and "step 7: train/loss was" in out
    record = in_project / "runs" / "a" / "run.json"
    text = record.read_text()
    record.write_text(text.replace('"threads": ', '"threads": 9'))
    try:
        assert main(["rewind", "a", "--to", "8", "--with", "probe.py:Changes"]) == 0
    finally:
        record.write_text(text)
    assert "Bits may differ here: threads 9" in capsys.readouterr().out


def test_the_step_that_failed_is_seen_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewind", "failed", "--to", "10"]) == 1
    assert "Step 10 fails as recorded: ArithmeticError: a bad batch" in capsys.readouterr().out


def test_wrong_commands_say_what_is_right(capsys: pytest.CaptureFixture[str], in_project: Path) -> None:
    for words, text in (
        (["a", "--to", "17"], "the last step of runs/a is 16: choose 1 to 16."),
        (["b", "--to", "1"], "b is not the directory of a run: it does not exist"),
        (["a", "--to", "1", "--with", "prob.py:Probe"], "prob.py does not exist. Did you mean 'probe.py'"),
        (["a", "--to", "1", "--with", "probe.py:Prob"], "no hook 'Prob'. Did you mean 'Probe'"),
        (["a", "--to", "1", "--with", "probe"], "--with 'probe': give a file and a class in it"),
        (["a", "--to", "1", "--without", "post"], "no hook of this name. Did you mean 'posts'"),
        (["a", "--to", "1", "--prompt", "--json"], "--prompt cannot be combined with --json"),
    ):
        assert text in said(capsys, "rewind", *words, code=2)


def test_class_paths_of_a_record_are_only_imported_from_this_folder(
    capsys: pytest.CaptureFixture[str], in_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(in_project / "runs" / "a")
    text = said(capsys, "rewind", run, "--to", "2", code=2)
    assert "may not be imported from here" in text
    assert "--config CONFIG" in text
    assert "to step 2" in said(capsys, "rewind", run, "--to", "2", "--config", str(in_project / "run.toml"))


def test_a_run_without_a_seed_cannot_begin_again_without_a_checkpoint(
    capsys: pytest.CaptureFixture[str], in_project: Path
) -> None:
    (in_project / "unseeded.toml").write_text(RUN.replace("seed = 1\n", ""))
    words = ["--trainer.run_dir", "runs/unseeded", "--hooks.posts", "false"]
    assert main(["fit", "unseeded.toml", *words]) == 0
    capsys.readouterr()
    text = said(capsys, "rewind", "unseeded", "--to", "4", code=2)
    assert "it had no seed" in text and "Its first checkpoint is of step 5: choose a later step" in text
    assert "equal to the bit" in said(capsys, "rewind", "unseeded", "--to", "7")


def test_a_webhook_does_not_send_again_and_its_hidden_address_is_not_needed(
    capsys: pytest.CaptureFixture[str], in_project: Path
) -> None:
    with serving() as server:
        hook = f'[hooks.webhook]\nurl = "{server.url("/secret")}"\nnotify_on = ["epoch_end"]\n'
        (in_project / "hooked.toml").write_text(RUN + hook)
        words = ["--trainer.run_dir", "runs/hooked", "--hooks.posts", "false"]
        assert main(["fit", "hooked.toml", *words]) == 0
        assert len(server.got) == 2
        capsys.readouterr()
        assert "webhook (it only observes)" in said(capsys, "rewind", "hooked", "--to", "16")
        assert len(server.got) == 2
    assert "secret" not in (in_project / "runs" / "hooked" / "run.json").read_text()
    token = '[hooks.mine]\nclass_path = "rewound_model.HasToken"\napi_key = "sk-1234567890abcdef"\n'
    (in_project / "token.toml").write_text(RUN + token)
    assert main(["fit", "token.toml", "--trainer.run_dir", "runs/token"]) == 0
    capsys.readouterr()
    text = said(capsys, "rewind", "token", "--to", "6", code=2)
    assert "does not show some values of hooks.mine" in text and "--config CONFIG" in text
    assert "equal to the bit" in said(capsys, "rewind", "token", "--to", "6", "--config", "token.toml")


# ---- the prompt --------------------------------------------------------------------------------------------


def test_a_prompt_at_a_terminal_has_the_model_and_the_batch(in_project: Path) -> None:
    ours, theirs = pty.openpty()
    words = ["rewind", "a", "--to", "7", "--prompt", "--without", "posts"]
    job = preloaded.Popen(
        [sys.executable, "-m", "hookline", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=in_project,
        env=environment(TERM="dumb"),
    )
    os.close(theirs)
    with os.fdopen(ours, "rb+", buffering=0) as terminal, job:
        text = _read_until(terminal, ">>> ")
        assert "Paused at step 7. Names: trainer, model, batch, optimizer, step." in text
        terminal.write(b"print('shape', tuple(batch[0].shape), type(optimizer).__name__)\n")
        assert "shape (4, 4) Adam" in _read_until(terminal, ">>> ")
        terminal.write(b"print(type(model).__name__, trainer.global_step + 0 * step)\n")
        assert "Net 7" in _read_until(terminal, ">>> ")
        terminal.write(b"exit()\n")
        assert job.wait(120) == 0


def test_a_prompt_reads_from_a_pipe_and_an_error_in_it_is_shown(in_project: Path) -> None:
    words = ["rewind", "failed", "--to", "10", "--prompt", "--without", "posts"]
    done = preloaded.run(
        [sys.executable, "-m", "hookline", *words],
        input="print('found', batch[0].shape[0], repr(error))\nmodel.nothing\nexit()\n",
        capture_output=True,
        text=True,
        cwd=in_project,
        env=environment(),
    )
    assert done.returncode == 1
    assert "found 4 ArithmeticError('a bad batch')" in done.stdout
    assert "has no attribute 'nothing'" in done.stderr


def _read_until(terminal: Any, end: str) -> str:
    """Return what a terminal shows until it ends with a text."""
    text, until = "", time.monotonic() + 120
    while not text.endswith(end):
        assert time.monotonic() < until, text
        if select.select([terminal], [], [], 1)[0]:
            text += terminal.read(10_000).decode()
    return text
