"""Lightning programs with unchanged import lines: `hookline run --as lightning`, or one line in the program."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import preloaded
import pytest
from dialects.test_lightning import EXAMPLE, OF_2019
from interop.processes import environment

SAID = "hookline: replaced {}.Trainer with hookline.interop.lightning.Trainer"
IMPORTS = {
    "from lightning.pytorch import Trainer": "Trainer",
    "from lightning import Trainer": "Trainer",
    "import lightning as L": "L.Trainer",
    "import lightning.pytorch as pl": "pl.Trainer",
    "from lightning.pytorch.trainer import Trainer": "Trainer",
    "from lightning.pytorch.trainer.trainer import Trainer": "Trainer",
    "from lightning.pytorch.cli import LightningCLI": "LightningCLI.__init__.__defaults__[4]",
}
KEPT = """
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
for kept in (Callback, LightningDataModule, LightningModule, ModelCheckpoint, CSVLogger):
    assert kept.__module__.startswith("lightning."), kept
import inspect
assert "Callback" in str(inspect.signature(L.Trainer).parameters["callbacks"].annotation)  # for LightningCLI
"""


def run(program: str, folder: Path, *words: str, anew: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that has imported what Lightning imports, but not Lightning; anew: nothing."""
    (folder / "program.py").write_text(program)
    start: Any = subprocess.run if anew else preloaded.run
    done: subprocess.CompletedProcess[str] = start(
        [sys.executable, *words, "program.py"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done


AS = ("-m", "hookline", "run", "--as", "lightning")


def test_every_import_line_gives_hooklines_trainer_and_all_else_stays_lightnings(tmp_path: Path) -> None:
    shown = "".join(f"{line}\nprint({name}.__module__)\n" for line, name in IMPORTS.items())
    done = run(shown + KEPT, tmp_path, *AS)
    assert done.returncode == 0, done.stderr
    homes = done.stdout.split()
    assert len(homes) == len(IMPORTS) and all(home.startswith("hookline.interop.lightning") for home in homes)
    assert done.stderr.splitlines() == [SAID.format("lightning.pytorch")]


def test_the_older_package_has_hooklines_trainer_too(tmp_path: Path) -> None:
    program = (
        "from pytorch_lightning import Trainer\nimport pytorch_lightning as pl\n"
        "print(Trainer.__module__, pl.Trainer is Trainer, pl.LightningModule.__module__)"
    )
    done = run(program, tmp_path, *AS)
    assert done.stdout.split() == [
        *(done.stdout.split()[:1]),
        "True",
        "pytorch_lightning.core.module",
    ] and done.stdout.startswith("hookline.interop.lightning"), done.stderr
    assert done.stderr.splitlines() == [SAID.format("pytorch_lightning")]


@pytest.mark.parametrize("form", ["command", "line", "line after the package"])
def test_the_documented_example_runs_on_hooklines_loop(form: str, tmp_path: Path) -> None:
    program = EXAMPLE + "print(type(trainer).__module__)\n"
    line = "import hookline.interop.run_as_lightning\n"
    if form != "command":
        program = ("import lightning\n" if form == "line after the package" else "") + line + program
    done = run(program, tmp_path, *(AS if form == "command" else ()), anew=form == "command")
    assert done.returncode == 0, done.stderr
    starts = [line for line in done.stdout.splitlines() if line.endswith("starting!")]
    assert starts == ["Callback: Training is starting!", "Model: Training is starting!"]
    assert done.stdout.splitlines()[-1].startswith("hookline.interop.lightning")
    assert done.stderr.splitlines()[0] == SAID.format("lightning.pytorch")


def test_without_a_request_lightning_stays_itself_and_the_last_line_says_what_to_add(tmp_path: Path) -> None:
    done = run("from lightning.pytorch import Trainer\nprint(Trainer.__module__)", tmp_path, *AS[:-2])
    assert done.stdout == "lightning.pytorch.trainer.trainer\n"
    assert done.stderr == (
        "hookline: replaced nothing, because lightning is installed; add --as lightning to replace it\n"
    )


def test_a_line_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    program = "from lightning.pytorch import Trainer\nimport hookline.interop.run_as_lightning\n"
    done = run(program, tmp_path)
    assert done.returncode == 1
    assert "import hookline.interop.run_as_lightning before lightning" in done.stderr.splitlines()[-1]


def test_the_hooks_of_the_page_of_2019_are_called_on_todays_modules(tmp_path: Path) -> None:
    """All but one of its blocks have a comment for a body, so a line that notes the call comes after each."""
    blocks = "".join(f"{block}    heard.append({name!r})\n" for name, block in OF_2019.items())
    program = f"""
from collections import Counter
from lightning.pytorch import Trainer
from lightning.pytorch.demos import BoringModel
from hookline.loggers import JSONLines, read_log

heard = []
class Documented(BoringModel):
{textwrap.indent(blocks, "    ")}
options = dict(limit_train_batches=26, limit_val_batches=1, num_sanity_val_steps=0, enable_progress_bar=False)
Trainer(max_epochs=1, logger=JSONLines("log.jsonl"), log_every_n_steps=13, **options).fit(Documented())
heard += [f"{{row['tag']}} at {{row['step']}}" for row in read_log("log.jsonl") if row["type"] == "histogram"]
print(sorted(Counter(heard).items()))
"""
    done = run(program, tmp_path, *AS)
    assert done.returncode == 0, done.stderr
    counts = dict(eval(done.stdout.splitlines()[-1]))
    assert counts.pop("on_tng_metrics") >= 2
    assert counts == {
        **dict.fromkeys(("on_batch_start", "on_before_zero_grad", "on_after_backward"), 26),
        **dict.fromkeys(
            ("on_epoch_start", "on_epoch_end", "on_pre_performance_check", "on_post_performance_check"), 1
        ),
        **{f"layer.{part} at {step}": 1 for part in ("weight", "bias") for step in (0, 25)},
    }


def test_a_modules_own_experiment_is_not_touched(tmp_path: Path) -> None:
    program = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos import BoringModel
class Own(BoringModel):
    def __init__(self, value):
        super().__init__()
        self.experiment = value
    def on_train_end(self):
        print(type(self.experiment).__name__, hasattr(self, "nothing"))
for value in ("text", torch.nn.Linear(1, 1)):
    Trainer(max_epochs=1, logger=False, limit_train_batches=1, limit_val_batches=0, enable_progress_bar=False).fit(Own(value))
plain = BoringModel()
print(hasattr(plain, "experiment"))
"""
    done = run(program, tmp_path, *AS)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert said == ["str False", "Linear False", "False"]
