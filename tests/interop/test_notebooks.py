"""Training in a notebook with a real kernel: one output for progress, rich output, interrupts, cells that run again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "spirals.ipynb"


@dataclass
class Cell:
    """What a cell has shown: texts of streams, the last version of each display, its result and its error."""

    text: str = ""
    stderr: str = ""
    shown: list[dict[str, str]] = field(default_factory=list)
    named: dict[str | None, dict[str, str]] = field(default_factory=dict)
    result: dict[str, str] = field(default_factory=dict)
    error: str = ""


class Kernel:
    """A real kernel of this environment, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manager = KernelManager(kernel_name="python3")
        # without pytest's variable, in which ipykernel does not show what is written to file descriptors
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self.manager.start_kernel(cwd=str(folder), env={**env, "OMP_NUM_THREADS": "1"})
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)

    def run(self, code: str, interrupt_at: str = "") -> Cell:
        """Run a cell. interrupt_at: interrupt the kernel, as the button of a notebook does, once this was printed."""
        cell = Cell()
        request = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=300)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return cell
            if kind == "stream":
                cell.text += content["text"]
                cell.stderr += content["text"] if content["name"] == "stderr" else ""
            elif kind in ("display_data", "update_display_data"):
                name = content["transient"].get("display_id")
                shown = cell.named.get(name, {}) if name else {}
                if not shown:
                    cell.shown.append(shown)
                cell.named[name] = shown
                shown.update(content["data"])
            elif kind == "execute_result":
                cell.result = content["data"]
            elif kind == "error":
                cell.error = "\n".join([content["ename"], *content["traceback"]])
            if interrupt_at and interrupt_at in cell.text:
                interrupt_at = ""
                self.manager.interrupt_kernel()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    started = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        yield started
    finally:
        started.close()


SETUP = """
import time, threading
import torch
from torch.utils.data import DataLoader, TensorDataset
from hookline import Hook, Report, Trainer

torch.manual_seed(0)
inputs = torch.randn(240, 4)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

class Slow(Hook):
    pause = 0.0

    def on_step_end(self, step):
        time.sleep(self.pause)
        if step == 3:
            print("third step", flush=True)

    def on_exception(self, exception):
        print("exception", type(exception).__name__)

    def on_train_end(self, status):
        print("end", status)

    def teardown(self):
        print("teardown")

def fit(trainer, workers=0, **options):
    net = torch.nn.Linear(4, 1)
    loader = DataLoader(data, batch_size=4, num_workers=workers)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    return trainer.fit(net, loader, loss=torch.nn.functional.mse_loss, optimizer=sgd, **options)

slow = Slow()
trainer = Trainer(max_epochs=2, run_dir="run", hooks=[slow])
"""


@pytest.fixture(scope="module")
def prepared(kernel: Kernel) -> Kernel:
    made = kernel.run(SETUP)
    assert made.error == ""
    return kernel


def test_progress_is_one_output_that_is_replaced_and_metrics_are_a_table(prepared: Kernel) -> None:
    cell = prepared.run("fit(trainer)")
    assert cell.error == ""
    bar, costs, model = cell.shown
    assert bar["text/plain"].startswith("epoch 1/2 █")
    assert "60/60" in bar["text/plain"]
    assert "epoch 0 batch" not in cell.text  # no line for each refresh
    assert costs["text/html"].startswith("<details><summary>Hooks took ") and "<table" in costs["text/html"]
    assert "Time: " in costs["text/plain"] and "Time: " in costs["text/html"]
    assert model["text/html"].startswith("<details><summary>Model: run/checkpoints/last (step 120)</summary>")
    assert "Load it: " in model["text/plain"] and "Model:" not in cell.text
    assert cell.stderr == ""  # a notebook marks it as an error
    assert "train/loss" in cell.result["text/html"]
    assert "<table" in cell.result["text/html"]
    assert cell.result["text/plain"].startswith("{'train/loss': ")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_cell_ends_the_run_cleanly_and_can_be_run_again(
    prepared: Kernel, workers: int
) -> None:
    prepared.run("slow.pause = 0.05")
    cell = prepared.run(f"fit(trainer, workers={workers})", interrupt_at="third step")
    assert "end interrupted" in cell.text
    assert cell.text.count("exception KeyboardInterrupt") == cell.text.count("teardown\n") == 1
    assert cell.error.startswith("KeyboardInterrupt")
    assert "Saved: run/checkpoints/last, at step" in cell.error
    assert "Traceback" not in cell.error  # how to resume, and not where the loop was
    assert "SIGINT: finishing this batch" in cell.text
    (warning,) = cell.stderr.splitlines()  # what is no warning is not on stderr
    assert warning.startswith("run has a completed run at step ")
    assert prepared.run("print(trainer.status)").text == "interrupted\n"
    prepared.run("slow.pause = 0.0")
    # the same trainer, then a new one in the same directory: nothing is locked, and no hook is there twice
    resumed = prepared.run(
        f"fit(trainer, workers={workers}, resume='auto')\nprint('at', trainer.global_step)"
    )
    assert resumed.error == ""
    assert "resuming from run/checkpoints/last" in resumed.text
    assert resumed.stderr == ""
    assert "at 120\n" in resumed.text
    again = prepared.run(
        f"new = Trainer(max_epochs=1, run_dir='run', hooks=[slow])\nfit(new, workers={workers})\nprint(new.status)"
    )
    assert again.error == ""
    assert again.text.count("third step") == again.text.count("teardown\n") == 1
    assert "completed\n" in again.text
    assert len(again.shown) == 3  # the progress, the costs and the model


def test_load_best_shows_its_report_once(prepared: Kernel) -> None:
    cell = prepared.run(
        "from hookline.hooks import ModelCheckpoint, WeightAveraging\n"
        "hooks = [ModelCheckpoint(monitor='train/loss'), WeightAveraging()]\n"
        "keeping = Trainer(max_epochs=1, run_dir='kept', hooks=hooks)\n"
        "fit(keeping)\n"
        "keeping.load_best()"
    )
    assert cell.error == "" and cell.stderr == ""
    assert cell.result["text/plain"].startswith("kept/checkpoints/") and "taking the averaged" in cell.text
    assert "weights loaded" in cell.result["text/plain"] and "weights loaded" not in cell.text


def test_explain_and_report_are_shown_in_cells(prepared: Kernel) -> None:
    explained = prepared.run("trainer.explain(torch.nn.Linear(4, 1))").result
    assert "<details open><summary>each epoch</summary>" in explained["text/html"]
    assert "on_step_end" in explained["text/html"]
    assert explained["text/plain"].startswith("trainer.fit()")
    prepared.run("other = Trainer(max_epochs=1, run_dir='other')\nfit(other)")
    report = prepared.run("Report(other)").result
    assert report["text/html"].startswith("<iframe sandbox=")
    assert report["text/plain"].startswith("other: completed, step 60")


def test_explain_names_the_cell_of_a_function(prepared: Kernel) -> None:
    prepared.run(
        """def loss_of_cell(outputs, targets):
    return (outputs - targets).abs().mean()

named = Trainer(enable_progress_bar=False)
@named.on("step_end")
def seen(step): ...
"""
    )
    traceback = plain(prepared.run("loss_of_cell(1, 2)").error)
    found = re.search(r"(Cell In\[\d+\]), line 2, in loss_of_cell", traceback)
    assert found is not None, traceback
    shown = prepared.run("print(named.explain(torch.nn.Linear(4, 1), loss=loss_of_cell))").text
    assert f"hook seen ({found[1]}, line 5)" in shown
    assert f"module loss_of_cell ({found[1]}, line 1)" in shown
    assert "ipykernel" not in shown


def test_the_bar_of_a_fit_that_failed_says_so(prepared: Kernel) -> None:
    cell = prepared.run(
        """
def broken(outputs, targets):
    broken.calls = getattr(broken, "calls", 0) + 1
    if broken.calls == 7:
        raise ValueError("broken")
    return torch.nn.functional.mse_loss(outputs, targets)

fails = Trainer(max_epochs=2, run_dir="fails")
net = torch.nn.Linear(4, 1)
fails.fit(net, DataLoader(data, batch_size=4), loss=broken, optimizer=torch.optim.SGD(net.parameters(), lr=0.01))
"""
    )
    assert cell.error.startswith("ValueError")
    assert re.match("epoch 0/2 █*░+ 6/60 .*failed", cell.shown[0]["text/plain"])


def test_a_refused_fit_leaves_no_run(prepared: Kernel) -> None:
    prepared.run("import hookline\nrefusing = Trainer(max_epochs=1, default_root_dir='refused')")
    assert "OptionError" in prepared.run("refusing.fit(torch.nn.Linear(4, 1), DataLoader(data))").error
    assert (
        "OptionError"
        in prepared.run("refusing.fit(torch.nn.Linear(4, 1), DataLoader(data), los=print)").error
    )
    assert prepared.run("print(len(hookline.list_runs('refused').runs))").text == "0\n"
    assert "max_epochs" in prepared.run("refusing.max_epoch = 4").error


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_traceback_has_the_frames_of_the_user_and_of_torch_only(prepared: Kernel) -> None:
    prepared.run(
        """
class Two(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :2])

def failing(**options):
    net = Two(4, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    Trainer(max_epochs=1, run_dir="failing").fit(net, DataLoader(data, batch_size=4), optimizer=sgd, **options)
"""
    )
    shape = plain(prepared.run("failing(loss=torch.nn.functional.mse_loss)").error)
    assert "Cell In" in shape and "in Two.forward" in shape and "torch/nn/modules/linear.py" in shape
    assert "src/hookline" not in shape and shape.count("cannot be multiplied") == 1
    assert len(shape.splitlines()) < 60
    prepared.run("import os\nos.environ['HOOKLINE_FULL_TRACEBACK'] = '1'")
    full = plain(prepared.run("failing(loss=torch.nn.functional.mse_loss)").error)
    prepared.run("del os.environ['HOOKLINE_FULL_TRACEBACK']")
    assert "hookline/training/trainer.py" in full
    for code in (
        "failing()",
        "Trainer(max_epoch=3)",
        "Trainer(precision='fp16')",
        "trainer.fit(3)",
        "@trainer.on('step_end')\ndef f(los): ...",
        "trainer.max_epoch = 4",
        "trainer.metrcs",
    ):
        refused = plain(prepared.run(code).error)
        assert refused and "hookline/" not in refused and len(refused.splitlines()) < 30, refused
        assert "<string>" not in refused, refused  # the `__init__` of a dataclass of Hookline


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_interrupted_evaluation_shows_the_cell_and_not_hookline(prepared: Kernel, stage: str) -> None:
    prepared.run(
        """
class Naps(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if index == 3:
            print("third sample", flush=True)
        time.sleep(0.01)
        return inputs[0], inputs[0, :1]

evaluating = Trainer(enable_progress_bar=False)
"""
    )
    given = "" if stage == "predict" else ", loss=torch.nn.functional.mse_loss"
    cell = prepared.run(
        f"evaluating.{stage}(torch.nn.Linear(4, 1), DataLoader(Naps()){given})", interrupt_at="third sample"
    )
    shown = plain(cell.error)
    assert shown.startswith("KeyboardInterrupt") and "Cell In" in shown and f"evaluating.{stage}" in shown
    assert "src/hookline" not in shown, shown


AUTORELOAD = """
%load_ext autoreload
%autoreload 2
import os, time

def write(activation, more=""):
    with open("edited.py", "w") as file:
        file.write(f'''
import torch
from torch import nn
from torch.utils.data import DataLoader
import hookline
from hookline.interop.lightning import Callback, LightningModule
{more}
class Named(Callback):
    def __init__(self, text):
        self.text = text
    def on_train_end(self, trainer, pl_module):
        print("end", self.text, pl_module.hparams)
class Net(hookline.Module):
    def __init__(self, width=8):
        super().__init__()
        self.act = nn.{activation}()
class Own(hookline.Hook):
    def __init__(self, by=1):
        super().__init__()
        self.act = "{activation}()"
class Dialect(LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.act = nn.{activation}()
        self.layer = nn.Linear(1, 1)
    def train_dataloader(self):
        return [DataLoader([torch.ones(1) * {len(activation)}]), DataLoader([torch.ones(1)])]
    def training_step(self, batch, batch_idx):
        print("batch", *(int(each) for each in batch))
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def configure_callbacks(self):
        return [Named("{activation}")]
''')
    write.time = getattr(write, "time", time.time()) + 10  # a file of the same second counts as unchanged
    os.utime("edited.py", (write.time, write.time))

def shown():
    from hookline.engine.init_arguments import init_arguments
    for made in (Net(3), edited.Net(3)):
        print(made.act, init_arguments(made).recorded)
    print(Own().act, before.act)
    for made in (Dialect(3), edited.Dialect(3)):
        print(made.act, made.hparams)
        hookline.Trainer(max_epochs=1, enable_progress_bar=False, logger=False, checkpoint=False).fit(made)

write("ReLU")
import edited, hookline
from edited import Dialect, Net, Own
before = Net()
"""


def test_autoreload_replaces_modules_hooks_and_classes_of_the_dialect_of_lightning(kernel: Kernel) -> None:
    """IPython patches the first edit in place; the second one adds code for which it loads the file again."""
    assert kernel.run(AUTORELOAD).error == ""
    for activation, more in (("Tanh", ""), ("Sigmoid", "class Extra(str):\n    x = print('loaded')")):
        assert kernel.run(f"write({activation!r}, {more!r})").error == ""
        cell = kernel.run("shown()")
        assert cell.error == "", plain(cell.error)
        made = f"{activation}() {{'width': 3}}"
        loaded = ["loaded"] if more else []
        lines = [*loaded, made, made, f"{activation}() ReLU()"]
        fitted = [made, f"batch {len(activation)} 1", f"end {activation} {{'width': 3}}"]
        assert cell.text.splitlines() == [*lines, *fitted, *fitted]
    kernel.run("%autoreload 0")


def test_a_cell_that_defines_a_hook_again_replaces_it_and_one_that_only_adds_it_does_not(
    prepared: Kernel,
) -> None:
    define = "class Watch(Hook):\n    def on_step_end(self): ...\n"
    prepared.run("fresh = Trainer(enable_progress_bar=False)")
    for _ in range(2):
        assert (
            prepared.run(define + "fresh.add_hook(Watch())\nprint(*fresh.hooks.list_hooks())").text
            == "watch\n"
        )
    assert prepared.run("fresh.add_hook(Watch())\nprint(*fresh.hooks.list_hooks())").text == "watch watch_2\n"
    assert "A hook named 'watch' exists" in prepared.run("fresh.add_hook(Watch(), name='watch')").error


def test_the_example_notebook_runs_and_learns(kernel: Kernel) -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    for cell in notebook.cells:
        cell.source = cell.source.replace("max_epochs=20", "max_epochs=8")
    client: Any = NotebookClient(notebook, km=kernel.manager, timeout=500)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    results = [
        output["data"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "execute_result"
    ]
    tree, fitted, report, validated = results
    assert "each epoch" in tree["text/html"]
    assert "show" in tree["text/html"]
    assert report["text/html"].startswith("<iframe sandbox=")
    for metrics in (fitted, validated):
        assert eval(metrics["text/plain"])["val/accuracy"] > 0.85  # 0.5 is chance
