"""`hookline checkpoint export | import`, as people and programs use it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.configured import PARTS, RUN
from safetensors.torch import load_file
from tiny import Net, batches, quiet

from hookline import load_weights
from hookline.cli import main
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.weight_averaging import WeightAveraging


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(["checkpoint", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(["checkpoint", *arguments]) == code
    return capsys.readouterr().err


# ---- export ------------------------------------------------------------------------------------------------------


def test_weights_are_exported_for_other_tools(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    hook = WeightAveraging(decay=0.5)
    quiet(run_dir="run", hooks=[hook, ModelCheckpoint()]).fit(net, batches())
    assert main(["checkpoint", "export", "run", "net.safetensors"]) == 0
    assert (
        "wrote net.safetensors (" in (said := capsys.readouterr().out)
        and "2 tensors, 10 numbers, from run/checkpoints/" in said
    )
    assert torch.equal(load_file("net.safetensors")["layer.weight"], hook.averages["layer.weight"])
    assert (
        main(["checkpoint", "export", "run", "raw.safetensors", "--weights", "raw"]) == 0
        and capsys.readouterr()
    )
    assert torch.equal(load_file("raw.safetensors")["layer.weight"], net.layer.weight)
    about = told(capsys, "export", "run", "ema.pt", "--hook", "weight_averaging")
    assert (about["out"], about["hook"], about["tensors"], about["bytes"]) == (
        "ema.pt",
        "weight_averaging",
        2,
        Path("ema.pt").stat().st_size,
    )
    assert torch.equal(torch.load("ema.pt", weights_only=True)["layer.weight"], hook.averages["layer.weight"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "taken.pt"], "taken.pt exists; --force replaces it"),
        (["run", "net.bin"], "net.bin must end with .pt, .safetensors, .onnx, .pt2"),
        (["run", "x.pt", "--hook", "model_chekpoint"], "Did you mean 'model_checkpoint'?"),
        (["run", "s3://bucket/x.pt"], "not to a URL"),
    ],
)
def test_a_wrong_export_is_explained_and_writes_nothing(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet(run_dir="run", hooks=[ModelCheckpoint()]).fit(Net(), batches())
    Path("taken.pt").write_text("precious")
    assert main(["checkpoint", "export", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert Path("taken.pt").read_text() == "precious" and sorted(each.name for each in Path().iterdir()) == [
        "run",
        "taken.pt",
    ]


def test_the_best_checkpoint_of_a_run_is_exported(capsys: pytest.CaptureFixture[str]) -> None:
    keep = ModelCheckpoint(monitor="val/loss", mode="max", save_last=True)  # the first is the best
    quiet(run_dir="run", hooks=[keep], max_epochs=3).fit(Net(), batches(), batches(1))
    newest = told(capsys, "export", "run", "newest.pt")
    best = told(capsys, "export", "run", "best.pt", "--checkpoint", "best")
    assert best["path"] == keep.best_model_path and best["step"] < newest["step"]
    said = refused(capsys, "export", keep.best_model_path, "again.pt", "--checkpoint", "best")
    assert "searches the directory of a run" in said


def test_force_replaces_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(run_dir="run", hooks=[ModelCheckpoint()]).fit(Net(), batches())
    Path("taken.pt").write_text("old")
    assert main(["checkpoint", "export", "run", "taken.pt", "--force"]) == 0
    assert set(torch.load("taken.pt", weights_only=True)) == {"layer.weight", "layer.bias"}


# ---- other formats -----------------------------------------------------------------------------------------------


def test_folders_are_exported_with_their_format(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    quiet(run_dir="run", hooks=[ModelCheckpoint()]).fit(net, batches())
    about = told(capsys, "export", "run", "hf", "--format", "hf-sharded", "--shard-size", "10B")
    assert (about["format"], about["tensors"]) == ("hf-sharded", 2)
    assert len(list(Path("hf").iterdir())) == 3 and load_weights(Net(), "hf").complete
    about = told(capsys, "export", "run", "part", "--format", "hf-sharded", "--prefix", "layer.")
    assert set(load_file("part/model.safetensors")) == {"weight", "bias"}
    assert "rename leaves out every weight" in refused(capsys, "export", "run", "x.pt", "--prefix", "modle.")
    assert "shard_size='5' is not a size" in refused(capsys, "export", "run", "x", "--format", "hf-sharded", "--shard-size", "5")  # fmt: skip
    assert "hf exists; --force" in refused(capsys, "export", "run", "hf", "--format", "hf-sharded")
    assert "--dynamic-batch are for the formats onnx" in refused(
        capsys, "export", "run", "x.pt", "--dynamic-batch"
    )
    assert sorted(each.name for each in Path().iterdir()) == ["hf", "part", "run"]


# ---- programs of a run from a configuration ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of a configuration, in `run`."""
    import sys

    folder = tmp_path_factory.mktemp("project")
    (folder / "exported_parts.py").write_text(PARTS)
    (folder / "run.toml").write_text(RUN.replace("cli_parts", "exported_parts"))
    path, here = list(sys.path), os.getcwd()
    os.chdir(folder)
    assert main(["fit", "run.toml", "--trainer.run_dir", "run", "--trainer.max_epochs", "1"]) == 0
    os.chdir(here)
    yield folder
    sys.path[:] = path
    sys.modules.pop("exported_parts", None)


@pytest.mark.parametrize(
    "options", [["--config", "run.toml"], ["--allow", "exported_parts"]], ids=["file", "run.json"]
)
def test_a_program_is_made_of_the_configuration(
    options: list[str], project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path.cwd()
    monkeypatch.chdir(project)
    out = here / "net.pt2"
    about = told(capsys, "export", "run", str(out), "--dynamic-batch", *options)
    assert (about["format"], about["step"]) == ("torch-export", 4)
    weights = load_file("run/checkpoints/last/model.safetensors")
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(
        torch.export.load(out).module()(inputs),
        torch.nn.functional.linear(inputs, weights["layer.weight"], weights["layer.bias"]),
    )
    about = told(
        capsys, "export", "run/checkpoints/last", str(out), "--force", "--method", "predict_step", *options
    )
    batch = torch.ones(2, 4), torch.ones(2, 2)
    assert torch.export.load(out).module()(batch).shape == (2, 2)


ANY_ENTRIES = """
import torch
from hookline import DataModule, Module

class Scaled(Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, **batch):  # as a module that passes its batches to a model of transformers
        return self.scale * batch["inputs"] + batch["shift"]

class Rows(DataModule):
    def predict_dataloader(self):
        return [{"inputs": torch.ones(2, 4), "shift": torch.ones(2, 1)}]
"""


def test_a_forward_that_takes_any_entries_of_a_batch_becomes_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "any_entries.py").write_text(ANY_ENTRIES)
    config = tmp_path / "any_entries.toml"
    config.write_text('module = "any_entries.Scaled"\ndatamodule = "any_entries.Rows"\n')
    torch.save({"scale": torch.full((1,), 3.0)}, "scale.pt")
    assert main(["checkpoint", "import", "scale.pt", "imported"]) == 0
    export = ["export", "imported", "scaled.pt2", "--config", str(config)]
    assert main(["checkpoint", *export]) == 0
    program = torch.export.load("scaled.pt2").module()
    assert torch.equal(program(inputs=torch.ones(2, 4), shift=torch.ones(2, 1)), torch.full((2, 4), 4.0))
    said = refused(capsys, *export, "--force", "--dynamic-batch")
    assert "not those that **kwargs takes. Name each as a parameter: inputs, shift." in said


def test_class_paths_of_a_record_are_not_imported_unless_they_are_allowed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "export", str(project / "run"), "net.pt2")
    assert "'exported_parts.Data' may not be imported from here, and was not" in said
    assert "--allow exported_parts" in said and "--config CONFIG" in said
    assert "method='predict', allowed" in refused(capsys, "export", str(project / "run"), "net.pt2", "--config", str(project / "run.toml"), "--method", "predict")  # fmt: skip
    assert not Path("net.pt2").exists()


def test_a_program_of_a_run_without_a_configuration_is_sent_to_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet(run_dir="run", hooks=[ModelCheckpoint()]).fit(Net(), batches())
    said = refused(capsys, "export", "run", "net.onnx")
    assert (
        "was not started from a configuration" in said
        and "hookline.export_checkpoint(source, out, module=" in said
    )
    Path("bare").mkdir()
    assert "There is no run.json in bare or above it" in refused(capsys, "export", "bare", "net.onnx")
    assert "s3://bucket/run is a URL" in refused(capsys, "export", "s3://bucket/run", "net.onnx")
    record = json.loads(Path("run/run.json").read_text())
    hidden = {"module": {"class_path": "x.Net", "init_args": {"api_key": "(not shown)"}}}
    Path("run/run.json").write_text(json.dumps({**record, "config": hidden}))
    assert "has values that are not shown" in refused(capsys, "export", "run", "net.onnx")


# ---- import ------------------------------------------------------------------------------------------------------


def test_weights_of_another_tool_become_a_checkpoint(project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    here = Path.cwd()
    weights = load_file(project / "run/checkpoints/last/model.safetensors")
    named = {f"model.{name}": value for name, value in weights.items()}
    torch.save({"state_dict": named, "global_step": 7, "epoch": 1}, "other.ckpt")
    about = told(capsys, "import", "other.ckpt", "imported", "--prefix", "model.")
    assert (about["step"], about["tensors"], about["numbers"]) == (7, 2, 10)
    assert told(capsys, "show", "imported")["reason"] == "import"
    assert told(capsys, "verify", "imported")[0]["whole"]
    assert load_weights(Net(), "imported").complete
    monkeypatch.chdir(project)
    assert main(["validate", "run.toml", "--checkpoint", "run", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)["metrics"]
    assert main(["validate", "run.toml", "--checkpoint", str(here / "imported"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == trained
    assert main(["fit", "run.toml", "--checkpoint", str(here / "imported")]) == 1
    assert "has only weights, imported from another tool: no run can be resumed" in capsys.readouterr().err


def test_an_import_replaces_only_a_checkpoint_and_only_if_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Net().state_dict(), "net.pt")
    told(capsys, "import", "net.pt", "imported")
    assert "imported exists; --force replaces it" in refused(capsys, "import", "net.pt", "imported")
    told(capsys, "import", "net.pt", "imported", "--force")
    assert "net.pt exists and is not a checkpoint" in refused(capsys, "import", "net.pt", "net.pt", "--force")
    assert "is a checkpoint of Hookline already" in refused(capsys, "import", "imported", "x", code=1)
    assert "s3://bucket/x is a URL" in refused(capsys, "import", "s3://bucket/x", "x")
    assert "has no 'ema'" in refused(capsys, "import", "net.pt", "x", "--key", "ema", code=1)
    assert sorted(each.name for each in Path().iterdir()) == ["imported", "net.pt"]


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-the-file",)


def test_code_in_a_file_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "x": Runs()}, "other.ckpt")
    assert "no code from it was run" in refused(capsys, "import", "other.ckpt", "imported", code=1)
    assert [each.name for each in Path().iterdir()] == ["other.ckpt"]
