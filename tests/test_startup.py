"""What is loaded when: the trainer without the loops, and a first fit without the parts that it does not use."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

MOST_MODULES = 56
FACADE = {"hookline.training", "hookline.training.run_view", "hookline.training.trainer"}
FIT = """
import torch
from hookline import Trainer

net = torch.nn.Linear(2, 1)
trainer = Trainer(max_epochs=1, run_dir="run", enable_progress_bar=False{options})
batches = [(torch.randn(4, 2), torch.randn(4, 1))] * 2
trainer.fit(net, batches, batches, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
assert trainer.status == "completed" and trainer.global_step == 2
"""
UNUSED = (
    "hookline.training.ranks.rank_sync",
    "hookline.training.ranks.preflight",
    "hookline.training.ranks.failure_monitor",
    "hookline.training.predict",
    "hookline.training.ranks.step",
    "hookline.checkpoint.foreign_files",
    "hookline.checkpoint.remote",
    "hookline.checkpoint.rank_writer",
    "hookline.checkpoint.weights",
    "hookline.data.mixture",
    "hookline.data.mixing",
    "hookline.engine.explain",
    "hookline.tracing.tracer",
    "hookline.tracing.writer",
    "hookline.distributed.accelerate",
    "hookline.distributed.ddp",
    "hookline.distributed.process_group",
    "hookline.distributed.fsdp",
    "hookline.loggers.queued",
    "hookline.loggers.artifacts",
    "hookline.loggers.run_artifacts",
    "hookline.loggers.clearml",
    "hookline.loggers.comet",
    "hookline.loggers.console",
    "hookline.loggers.csv_file",
    "hookline.loggers.mlflow",
    "hookline.loggers.tensorboard",
    "hookline.loggers.trackio",
    "hookline.loggers.wandb",
    "hookline.interop",
    "hookline.config",
    "hookline.hooks",
    "hookline.interop.loop",
    "hookline.report",
    "hookline.watch",
    "hookline.cli",
)


def loaded_by(code: str, folder: Path) -> set[str]:
    """The modules of Hookline that a process of its own has loaded after this code."""
    code += "\nimport sys\nprint('loaded', *(name for name in sys.modules if name.partition('.')[0] == 'hookline'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_importing_the_trainer_loads_few_modules_and_no_loop(tmp_path: Path) -> None:
    loaded = loaded_by("from hookline import Trainer", tmp_path)
    assert "hookline.training.trainer" in loaded
    assert len(loaded) <= MOST_MODULES
    high = ("hookline.training", "hookline.checkpoint", "hookline.control")
    assert {name for name in loaded if name.startswith(high)} == FACADE


def test_making_a_trainer_loads_nothing_more(tmp_path: Path) -> None:
    before = loaded_by("from hookline import Trainer", tmp_path)
    after = loaded_by("from hookline import Trainer\nTrainer(enable_progress_bar=False)", tmp_path)
    assert after == before


@pytest.mark.parametrize("control", [True, False])
def test_a_fit_on_one_device_leaves_out_what_it_does_not_use(tmp_path: Path, control: bool) -> None:
    loaded = loaded_by(FIT.format(options=f", control={control}"), tmp_path)
    assert "hookline.training.fit" in loaded
    assert sorted(loaded & set(UNUSED)) == []
    assert ("hookline.control.server" in loaded) == control


def test_every_part_that_a_fit_leaves_out_exists() -> None:
    """So that a part that has moved is not left out of the test above without notice."""
    for name in UNUSED:
        importlib.import_module(name)


@pytest.mark.parametrize("package", ["hookline.loggers", "hookline.distributed"])
def test_a_package_offers_all_its_names_and_loads_each_when_it_is_used(package: str, tmp_path: Path) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__module__.startswith(f"{package}.")
        assert pickle.loads(pickle.dumps(value)) is value
    everything: dict[str, object] = {}
    exec(f"from {package} import *", everything)
    assert set(module.__all__) <= set(everything)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018
    name = module.__all__[0]
    loaded = loaded_by(f"from {package} import {name}", tmp_path)
    assert getattr(module, name).__module__ in loaded
    assert not loaded & {"hookline.loggers.wandb", "hookline.distributed.fsdp"}
