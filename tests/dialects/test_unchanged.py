"""The documents' code blocks as programs of `hookline run`: import lines and all else as they are there.

What the documents take for granted (a model, data, standard modules) comes before the blocks.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from cli.programs import preloaded_run
from dialects.model_training_framework.documented import BLOCKS
from dialects.test_kempnerforge import GRAD_HISTOGRAM, INTERFACE, REGISTERING
from dialects.test_kempnerforge import STEP_CONTEXT as FORGE_CONTEXT
from dialects.trainers.documented import CUSTOM_HOOK, MANAGEMENT, QUICK_START, STATE

COMMON = """\
import random, time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import Mock
import torch
device = torch.device("cpu")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataloader = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(3)]
"""
PROGRAMS = {
    "trainers": [
        COMMON,
        QUICK_START,
        CUSTOM_HOOK,
        "my_hook = TrainingHook('mine')\n",
        MANAGEMENT,
        "trainer.train()\n",
        STATE,
        "print(set(state) <= set(trainer.state))\n",
    ],
    "kempnerforge": [
        COMMON,
        INTERFACE,
        GRAD_HISTOGRAM,
        "logged = []\nwandb = SimpleNamespace(log=lambda values, step: logged.append((values, step)))\n"
        "MyHook1, MyHook2 = MyHook, GradHistogramHook\n",
        REGISTERING,
        "hook_runner.hooks[1]._norms['weight'] = 0.5\nhook_runner.on_train_begin({})\n"
        "hook_runner.on_step_end(StepContext(3, 0.1, 0.2, 0.1, 8, model, optimizer))\n"
        "hook_runner.on_train_end(3, 8)\nprint(logged)\n",
        FORGE_CONTEXT,
    ],
    "model_training_framework": [
        COMMON,
        "from model_training_framework.trainer import GenericTrainer\n"
        "def create_test_model(): return torch.nn.Linear(1, 1)\n"
        "optimizers = [optimizer]\n",
        *(
            "class CustomHook1(StandardHooks): pass\nclass CustomHook2(StandardHooks): pass\n" + block
            if title == "Execution Order"
            else "StandardHooks = TrainerHooks\n" + block
            if title == "Complete Hook Interface"
            else block
            for title, block in BLOCKS.items()
            if title != "1. Hook Organization"  # a tree of files
        ),
        "test_custom_hook()\n"
        "for hook in (StatefulHook(), ProducerHook(), ConsumerHook(), ConditionalHook(), DebugHook(), RobustHook()):\n"
        "    trainer.hook_manager.register_hook(hook)\n"
        "trainer.set_training_step(lambda trainer, batch, *_: {'loss': (trainer.model(batch[0]) - batch[1]).pow(2).mean()})\n"
        "trainer.fit([dataloader], max_epochs=1)\n",
    ],
}
SAID = {
    "trainers": ["['json_log', 'checkpoint', 'my_custom_hook', 'mine']", "Average loss:", "True"],
    "kempnerforge": ["[({'grad_norm/weight': 0.5}, 3)]"],
    "model_training_framework": [
        "Training started!",  # of the class path
        "Training started!",  # of the instance
        "Epoch 0 completed",
        "Received metric: 0.95",
        "Training completed in",
    ],
}


@pytest.mark.parametrize("system", PROGRAMS)
def test_the_blocks_of_a_document_are_a_program_that_runs(system: str, tmp_path: Path) -> None:
    program = "\n".join(PROGRAMS[system])
    ast.parse(program)
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "hooks.py").write_text("import time\n" + BLOCKS["Basic Custom Hook"])
    done = preloaded_run("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"hookline: replaced {system} with hookline.interop.{system}\n")
    left = iter(done.stdout.splitlines())
    for said in SAID[system]:
        assert any(said in line for line in left), (
            f"{said!r} is not there, or not in this order:\n{done.stdout}"
        )
