"""`hookline diverge`: exit codes, JSON, errors, and a step that is found by running both runs again."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects.looped import net_and_sgd, train
from diverge.planted import AtStepEnd, Net, nudge, samples
from tiny import batches, quiet

import hookline
from hookline import Line
from hookline.cli import main
from hookline.hooks import ModelCheckpoint
from hookline.interop.demo import BoringModel
from hookline.interop.lightning import Trainer as LightningTrainer
from hookline.loggers.jsonl import JSONLines

PARTS = """
import torch
from torch import nn
from hookline import DataModule, Hook, Module

class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    def training_step(self, batch, batch_idx): return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self): return torch.optim.Adam(self.parameters(), lr=0.1)

class Data(DataModule):
    def train_dataloader(self):
        x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

class Nudge(Hook):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
    def on_step_end(self, module, step):
        if step == self.at:
            module.net[2].bias.data.add_(1e-5)
"""
RUN = """
[trainer]
max_epochs = 1
seed = 1
digest = "every 8 steps"
enable_progress_bar = false
[module]
class_path = "diverge_parts.Net"
[datamodule]
class_path = "diverge_parts.Data"
[hooks.keep]
class_path = "ModelCheckpoint"
every_n_train_steps = 5
save_top_k = -1
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with two runs; the second has a hook that changes a weight after step 12."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "diverge_parts.py").write_text(PARTS)
    (folder / "run.toml").write_text(RUN)
    (folder / "nudged.toml").write_text(f'{RUN}[hooks.nudge]\nclass_path = "diverge_parts.Nudge"\nat = 12\n')
    path, here = list(sys.path), os.getcwd()
    os.chdir(folder)
    for config, run in (("run", "a"), ("run", "same"), ("nudged", "b")):
        assert main(["fit", f"{config}.toml", "--trainer.run_dir", f"runs/{run}"]) == 0
    yield folder
    os.chdir(here)
    sys.path[:] = path
    sys.modules.pop("diverge_parts", None)


def tree(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the contents and the times of all files below a folder."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_step_between_two_digests_is_found_by_running_both_again(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    before = tree(project / "runs")
    assert main(["diverge", "a", "b", "--no-rerun"]) == 3
    assert capsys.readouterr().out.startswith(
        "A and B diverge between step 8, which is equal, and step 16: weights."
    )
    assert main(["diverge", "a", "b"]) == 3
    out = capsys.readouterr().out
    assert out.startswith("A and B diverge at step 13: hook.\n")
    assert "hook 'nudge' changed parameters (net.2.bias) in on_step_end of B" in out
    assert "found by running both again, steps 6 to 16 (A is as recorded, B is as recorded)" in out
    assert tree(project / "runs") == before


def test_equal_runs_end_with_zero_and_json_has_everything(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert main(["diverge", "a", "same"]) == 0
    assert capsys.readouterr().out == "A and B are equal: 3 digests of steps 1 to 16.\n"
    assert main(["diverge", "a", "b", "--json", "--no-rerun"]) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["divergence"]["last_equal_step"] == 8 and data["divergence"]["exact"] is False
    assert {"key": "hooks.nudge.class", "values": [None, "diverge_parts.Nudge"]} in data["causes"]
    assert main(["diverge", "a"]) == 0
    assert "the run was never resumed" in capsys.readouterr().out


def test_runs_of_a_program_get_the_interval_and_the_lines_for_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder, hooks in (("a", []), ("b", [AtStepEnd(5, nudge("last.bias"))])):
        torch.manual_seed(3)
        quiet(run_dir=folder, seed=1, digest=3, logger=True, hooks=hooks).fit(Net(), samples())
    assert main(["diverge", "a", "b"]) == 3
    out = capsys.readouterr().out
    assert out.startswith("A and B diverge between step 3, which is equal, and step 6: weights.")
    assert "the step cannot be narrowed: a was started by a program" in out
    assert "running" not in out and "not known yet" in out
    assert "with hookline.rewound('a', to=6, since=3, module=..., train=..., hooks=..., out='again-a'" in out


def test_runs_of_hand_written_loops_are_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    for folder, lr in (("a", 0.1), ("b", 0.2)):
        net, sgd = net_and_sgd(lr)
        line = Line(net, sgd, logger=True, log_every_n_steps=1, run_dir=folder)
        train(line, net, sgd, batches(2))
    assert main(["diverge", "a", "b"]) == 3
    said = capsys.readouterr()
    assert "running" not in said.err
    assert "a and b cannot be run again" in said.out and "log_every_n_steps=1" in said.out
    assert "rewound" not in said.out and "digest=" not in said.out


def test_the_lines_for_the_program_find_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    import hookline

    hooks: dict[str, list[Any]] = {"a": [], "b": [AtStepEnd(5, nudge("last.bias"))]}
    for folder, extra in hooks.items():
        torch.manual_seed(3)
        # a checkpoint after the divergence: the copies must begin before it
        extra.append(ModelCheckpoint(every_n_train_steps=5, save_top_k=-1))
        quiet(run_dir=folder, seed=1, digest=3, logger=True, hooks=extra).fit(Net(), samples())
    for folder in hooks:
        torch.manual_seed(3)
        details = {"every": 1, "modules": True}
        again = hookline.rewound(
            folder,
            to=6,
            since=3,
            module=Net(),
            train=samples(),
            hooks=hooks[folder],
            out=f"again-{folder}",
            digest=details,
        )
        with again:
            pass
    assert main(["diverge", "again-a", "again-b"]) == 3
    assert capsys.readouterr().out.startswith("A and B diverge at step 5: weights.")


def test_runs_of_a_lightning_trainer_are_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    for folder, seed in (("a", 1), ("b", 2)):
        hookline.seed_everything(seed)
        trainer = LightningTrainer(max_epochs=1, run_dir=folder, logger=JSONLines(), log_every_n_steps=1)
        trainer.fit(BoringModel())
    assert main(["diverge", "a", "b"]) == 3
    out = capsys.readouterr().out
    assert "the step cannot be narrowed: a was trained by hookline.interop.lightning" in out
    assert "rewound(" not in out


def test_runs_without_digests_are_narrowed_from_their_logs(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    options = ["--trainer.digest", "false", "--trainer.log_every_n_steps", "20"]
    for config, run in (("run", "c"), ("nudged", "d")):
        assert main(["fit", f"{config}.toml", "--trainer.run_dir", f"runs/{run}", *options]) == 0
    capsys.readouterr()
    assert main(["diverge", "c", "d", "--json"]) == 3
    printed = capsys.readouterr()
    divergence = json.loads(printed.out)["divergence"]
    assert (divergence["step"], divergence["kind"], divergence["names"]) == (13, "hook", ["nudge"])
    assert "running runs/c again, up to step 20" in printed.err


def test_code_that_fails_when_it_runs_again_leaves_the_interval(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    import diverge_parts  # type: ignore[import-not-found]

    def fails(self: object, batch: object, batch_idx: int) -> None:
        raise ZeroDivisionError("broken since")

    monkeypatch.setattr(diverge_parts.Net, "training_step", fails)
    assert main(["diverge", "a", "b"]) == 3
    out = capsys.readouterr().out
    assert out.startswith("A and B diverge between step 8, which is equal, and step 16: weights.")
    assert "the step cannot be narrowed: ZeroDivisionError: broken since" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "b", "--ranks"], "--ranks compares a run with itself: name one run"),
        (["a", "--ranks", "--resume"], "leave one of them out"),
        (["a", "nowhere"], "There is no run at nowhere"),
    ],
    ids=str,
)
def test_a_wrong_command_is_refused(
    words: list[str],
    said: str,
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(project)
    assert main(["diverge", *words]) == 2
    assert said in capsys.readouterr().err
