"""What is loaded when: the trainer without the loops, and a first fit without the parts that it does not use."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
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


SERVER = """
import os, sys
import torch._dynamo  # nothing of Hookline: to import it takes most of the time
for line in sys.stdin:
    folder, code = eval(line)
    if not (child := os.fork()):
        os.chdir(folder)
        exec(code, {"__name__": "__main__"})
        print("loaded", *(name for name in sys.modules if name.partition(".")[0] == "hookline"), flush=True)
        os._exit(0)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""
Load = Callable[[str], set[str]]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch and nothing of Hookline, and forks one for each code."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def loaded_by(server: subprocess.Popen[str], tmp_path: Path) -> Load:
    """The modules of Hookline that a process of its own has loaded after this code."""

    def load(code: str) -> set[str]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(f"{(str(tmp_path), code)!r}\n")
        server.stdin.flush()
        loaded = None
        for line in server.stdout:
            what, *names = line.split() or [""]
            if what == "loaded":
                loaded = set(names)
            elif what == "ended":
                assert names == ["0"], "its error is on stderr"
                break
        assert loaded is not None
        return loaded

    return load


def test_importing_the_trainer_loads_few_modules_and_no_loop(loaded_by: Load) -> None:
    loaded = loaded_by("from hookline import Trainer")
    assert "hookline.training.trainer" in loaded
    assert len(loaded) <= MOST_MODULES
    high = ("hookline.training", "hookline.checkpoint", "hookline.control")
    assert {name for name in loaded if name.startswith(high)} == FACADE


def test_making_a_trainer_loads_nothing_more(loaded_by: Load) -> None:
    before = loaded_by("from hookline import Trainer")
    after = loaded_by("from hookline import Trainer\nTrainer(enable_progress_bar=False)")
    assert after == before


@pytest.mark.parametrize("control", [True, False])
def test_a_fit_on_one_device_leaves_out_what_it_does_not_use(loaded_by: Load, control: bool) -> None:
    loaded = loaded_by(FIT.format(options=f", control={control}"))
    assert "hookline.training.fit" in loaded
    assert sorted(loaded & set(UNUSED)) == []
    assert ("hookline.control.server" in loaded) == control


def test_every_part_that_a_fit_leaves_out_exists() -> None:
    """So that a part that has moved is not left out of the test above without notice."""
    for name in UNUSED:
        importlib.import_module(name)


@pytest.mark.parametrize("package", ["hookline.loggers", "hookline.distributed"])
def test_a_package_offers_all_its_names_and_loads_each_when_it_is_used(package: str, loaded_by: Load) -> None:
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
    loaded = loaded_by(f"from {package} import {name}")
    assert getattr(module, name).__module__ in loaded
    assert not loaded & {"hookline.loggers.wandb", "hookline.distributed.fsdp"}
