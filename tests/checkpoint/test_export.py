"""Weights written for other tools: plain files, replaced only on request, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import Net, batches, quiet
from torch import Tensor, nn

from hookline import CheckpointError, OptionError, export_checkpoint, import_checkpoint, load_weights
from hookline.checkpoint.export import export_weights
from hookline.checkpoint.reader import read_folder
from hookline.hooks import ModelCheckpoint
from hookline.hooks.weight_averaging import WeightAveraging


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(4, 2)
        self.twin.weight = self.layer.weight


class Runs(Net):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs)


def trained(net: Any, *hooks: Any, path: str | Path = "run/checkpoints/made", steps: int = 2) -> Any:
    trainer = quiet(run_dir="run", hooks=hooks, max_steps=steps)
    trainer.fit(net, batches(steps))
    trainer.save_checkpoint(path)
    return net


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("out", ["weights.safetensors", "weights.pt"])
def test_exported_weights_are_plain(out: str) -> None:
    net = trained(Tied())
    done = export_weights("run", Path(out))
    assert done.where == "run/checkpoints/made" and set(done.weights) == set(net.state_dict())
    read = load_file(out) if out.endswith("safetensors") else torch.load(out, weights_only=True)
    again = Tied()
    again.load_state_dict(read)  # tied weights are there under both names
    assert same(weights(again), weights(net))
    assert sorted(each.name for each in Path().iterdir()) == ["run", out]


def test_a_file_that_exists_is_replaced_only_if_told_to() -> None:
    trained(Net())
    Path("weights.pt").write_text("precious")
    with pytest.raises(OptionError, match="weights.pt exists; --force"):
        export_weights("run", Path("weights.pt"))
    assert Path("weights.pt").read_text() == "precious"
    export_weights("run", Path("weights.pt"), force=True)
    assert set(torch.load("weights.pt", weights_only=True)) == {"layer.weight", "layer.bias"}


def test_an_export_that_fails_leaves_the_old_file_and_nothing_aside() -> None:
    trained(Extra())
    Path("weights.safetensors").write_text("precious")
    with pytest.raises(CheckpointError, match=r"cannot store _extra_state \(dict\). Export to a .pt file"):
        export_weights("run", Path("weights.safetensors"), force=True)
    assert Path("weights.safetensors").read_text() == "precious"
    assert sorted(each.name for each in Path().iterdir()) == ["run", "weights.safetensors"]
    export_weights("run", Path("weights.pt"))
    assert torch.load("weights.pt", weights_only=True)["_extra_state"] == {"words": ["a", "b"]}
    with pytest.raises(
        CheckpointError, match="nowhere/weights.pt could not be written: No such file or directory"
    ):
        export_weights("run", Path("nowhere/weights.pt"))


class Extra(Net):
    def get_extra_state(self) -> Any:
        return {"words": ["a", "b"]}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"words": ["a", "b"]}


def test_averaged_weights_take_the_place_of_those_they_average() -> None:
    class Normed(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

    hook = WeightAveraging(decay=0.5)
    net = trained(Normed(), hook)
    written = export_weights("run", Path("average.safetensors"), hook="weight_averaging").weights
    read = load_file("average.safetensors")
    assert (
        set(read) == set(net.state_dict()) == set(written)
    )  # buffers are not averaged, and come from the module
    assert torch.equal(read["layer.weight"], hook.averages["layer.weight"])
    assert torch.equal(read["twin.weight"], hook.averages["layer.weight"])  # tied
    assert not torch.equal(read["layer.weight"], net.layer.weight)


def test_a_hook_that_is_not_there_or_keeps_no_weights_is_refused() -> None:
    trained(Net(), WeightAveraging(start="100 steps"))
    with pytest.raises(
        OptionError,
        match="does not contain the state of a hook 'weight_avg'. Did you mean 'weight_averaging'",
    ):
        export_weights("run", Path("weights.pt"), hook="weight_avg")
    with pytest.raises(OptionError, match="weight_averaging in .* does not store weights.*not started"):
        export_weights("run", Path("weights.pt"), hook="weight_averaging")
    assert not Path("weights.pt").exists()


# ---- every format ------------------------------------------------------------------------------------------------


class Regression(Net):
    """Tied weights, statistics and a part that evaluation switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(4, 2)
        self.twin.weight = self.layer.weight
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.norm(self.layer(x) + self.twin(x)))
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"doubled": 2 * self(batch[0])}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Regression]:
    """The directory of a run, and the module that it trained."""
    run_dir = tmp_path_factory.mktemp("exported") / "run"
    torch.manual_seed(0)
    net = Regression()
    trainer = quiet(run_dir=run_dir, max_steps=3)
    trainer.fit(net, batches(3))
    trainer.save_checkpoint(run_dir / "checkpoints" / "made")
    return str(run_dir), net.eval()


def read_dcp(path: str) -> dict[str, Tensor]:
    from torch.distributed import checkpoint as dcp

    state = {name: torch.zeros_like(each) for name, each in Regression().state_dict().items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


READERS: dict[str, Any] = {
    "torch": ("out.pt", lambda path: torch.load(path, weights_only=True)),
    "safetensors": ("out.safetensors", load_file),
    "dcp": ("out", read_dcp),
    "hf-sharded": ("out", lambda path: load_weights_of_shards(path)),
}


def load_weights_of_shards(path: str) -> dict[str, Tensor]:
    files = sorted(Path(path).glob("model-*.safetensors"))
    assert len(files) == 2
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("format", READERS)
def test_the_real_reader_of_each_format_reads_the_weights(format: str, run: Any) -> None:
    out, reader = READERS[format]
    done = export_checkpoint(run[0], out, format, shard_size="50B" if format == "hf-sharded" else None)
    assert (done.format, done.step, done.tensors) == (format, 3, len(run[1].state_dict()))
    assert done.source.endswith("made") and done.bytes > 0
    read, wanted = reader(out), weights(run[1])
    if format == "hf-sharded":
        wanted.pop("twin.weight")  # transformers ties it again
    assert same(dict(sorted(read.items())), dict(sorted(wanted.items())))
    again = Regression()
    load_weights(again, import_checkpoint(out))
    assert same(weights(again), weights(run[1]))
    assert sorted(each.name for each in Path().iterdir()) == [out]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("format", READERS)
def test_shards_of_two_ranks_are_exported_by_one_process(format: str) -> None:
    golden = Path(__file__).parent.parent / "golden" / "v0.1" / "fsdp"
    out, _ = READERS[format]
    source = golden / "run"
    export_checkpoint(source, out, format)
    found = import_checkpoint(out).weights
    whole = read_folder(source / "checkpoints" / "batch-3")["module"]
    tied = {"again.weight", "again.bias"}
    assert tied <= whole.keys() and whole.keys() - found.keys() == (tied if format == "hf-sharded" else set())
    assert all(torch.equal(found[name], whole[name]) for name in found)
    if format == "torch":
        assert found["again.weight"].data_ptr() == found["layer.weight"].data_ptr()


def test_weights_are_renamed_and_left_out_on_the_way(run: Any) -> None:
    export_checkpoint(run[0], "norm", "hf-sharded", rename=lambda name: name.removeprefix("norm.") if "norm" in name else None)  # fmt: skip
    assert load_weights(nn.BatchNorm1d(2), "norm").complete
    with pytest.raises(
        OptionError, match="rename leaves out every weight of .*start with: layer., norm., twin."
    ):
        export_checkpoint(run[0], "none.pt", rename=lambda name: None)
    assert not Path("none.pt").exists()


def test_weights_of_another_tool_are_converted() -> None:
    torch.save({"state_dict": Net().state_dict()}, "other.ckpt")
    done = export_checkpoint(import_checkpoint("other.ckpt"), "net.safetensors")
    assert done.source == "other.ckpt" and done.step is None
    assert export_checkpoint("net.safetensors", "net", "hf-sharded").tensors == 2
    assert load_weights(Net(), "net").complete
    with pytest.raises(OptionError, match="hook='x' selects the weights of a hook, and only a checkpoint"):
        export_checkpoint("net", "x.pt", hook="x")


# ---- programs ----------------------------------------------------------------------------------------------------


def test_a_program_computes_what_the_module_does_and_the_module_is_left_as_it_was(run: Any) -> None:
    other = Regression()
    other.norm.eval()
    before = weights(other)
    export_checkpoint(run[0], "net.pt2", module=other, example=torch.randn(1, 4), dynamic_batch=True)
    assert same(weights(other), before) and (other.training, other.norm.training) == (True, False)
    inputs = torch.randn(7, 4)
    made = torch.export.load("net.pt2").module()(inputs)
    torch.testing.assert_close(made, run[1](inputs))
    assert sorted(each.name for each in Path().iterdir()) == ["net.pt2"]


def test_another_method_can_be_exported_and_a_fixed_batch_refuses_others(run: Any) -> None:
    inputs, targets = torch.randn(3, 4), torch.randn(3, 2)
    export_checkpoint(
        run[0], "net.pt2", module=Regression(), example=[inputs, targets], method="predict_step"
    )
    program = torch.export.load("net.pt2").module()
    torch.testing.assert_close(program([inputs, targets])["doubled"], 2 * run[1](inputs))
    with pytest.raises(AssertionError, match="3"):
        program([torch.randn(5, 4), torch.randn(5, 2)])


def test_inputs_can_be_given_by_name(run: Any) -> None:
    export_checkpoint(run[0], "net.pt2", module=Regression(), example={"x": torch.ones(2, 4)}, dynamic_batch=True)  # fmt: skip
    inputs = torch.randn(4, 4)
    torch.testing.assert_close(torch.export.load("net.pt2").module()(x=inputs), run[1](inputs))


class Branches(Regression):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"torch-export stores the computation too: pass module=.*not None: hookline.export_checkpoint"),
        ({"module": Regression}, "pass module=, a module of the class that was trained"),
        ({"module": Regression()}, r"traced with an example: pass example=, inputs as Regression.forward"),
        ({"module": Regression(), "example": 1, "method": "predict"}, r"method='predict'.*Did you mean 'predict_step'"),
        ({"module": nn.Linear(4, 2), "example": 1, "method": "predict_step"}, "that Linear has"),
        ({"module": Regression(), "example": 3, "dynamic_batch": True}, "no tensor with a batch dimension"),
    ],
)  # fmt: skip
def test_what_a_program_needs_is_asked_for(options: Any, said: str, run: Any) -> None:
    with pytest.raises(OptionError, match=said):
        export_checkpoint(run[0], "net.pt2", **options)
    assert not list(Path().iterdir())


def test_a_module_that_cannot_be_traced_or_does_not_fit_is_explained(run: Any) -> None:
    with pytest.raises(CheckpointError, match=r"Branches.forward could not be exported as torch-export: .*values of tensors"):  # fmt: skip
        export_checkpoint(run[0], "net.pt2", module=Branches(), example=torch.ones(2, 4))
    with pytest.raises(CheckpointError, match="do not fit Linear"):
        export_checkpoint(run[0], "net.pt2", module=nn.Linear(4, 2), example=torch.ones(2, 4))
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"module": Net()}, "module= is for the formats onnx and torch-export, and torch has weights only"),
        ({"dynamic_batch": True}, "dynamic_batch= is for the formats onnx"),
        ({"shard_size": "5GB"}, "shard_size= is for the format hf-sharded, and not for torch"),
        ({"weights": "rwa"}, "weights='rwa'.*Did you mean 'raw'"),
    ],
)
def test_options_of_other_formats_are_refused(options: Any, said: str, run: Any) -> None:
    with pytest.raises(OptionError, match=said):
        export_checkpoint(run[0], "net.pt", **options)


def test_onnx_says_which_packages_it_needs(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r'needs the package .onnxscript.: pip install "hookline\[onnx\]"'):
        export_checkpoint(run[0], "net.onnx", module=Regression(), example=torch.ones(2, 4))


def test_the_best_checkpoint_of_a_run_is_exported_if_asked_for() -> None:
    keep = ModelCheckpoint(monitor="val/loss", mode="max", save_last=True)  # the first is the best
    quiet(run_dir="run", hooks=[keep], max_epochs=3).fit(Net(), batches(), batches(1))
    newest = export_checkpoint("run", "newest.pt")
    assert export_checkpoint("run", "again.pt", checkpoint="auto").source == newest.source
    best = export_checkpoint(Path("run"), "best.pt", checkpoint="best")
    assert best.source == keep.best_model_path and (best.step or 0) < (newest.step or 0)
    program = export_checkpoint(
        "run", "best.pt2", module=Runs(), example=torch.randn(2, 4), checkpoint="best"
    )
    assert program.source == best.source
    (Path(keep.best_model_path) / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"has no checkpoint that a monitor kept .* 'auto' takes"):
        export_checkpoint("run", "none.pt", checkpoint="best")
    for source in (newest.source, "best.pt", {"a": torch.ones(1)}, "s3://bucket/run", "missing"):
        with pytest.raises(OptionError, match="checkpoint='best' searches the directory of a run"):
            export_checkpoint(source, "none.pt", checkpoint="best")
    with pytest.raises(OptionError, match="pass 'auto' or 'best'; a path is the source itself"):
        export_checkpoint("run", "none.pt", checkpoint="last")  # type: ignore[arg-type]
    assert not Path("none.pt").exists()


def test_the_best_one_is_of_the_newest_run_below_a_folder_that_has_one() -> None:
    for name, mode, hooks in (("a", "max", True), ("b", "min", True), ("c", "min", False)):
        keep = [ModelCheckpoint(monitor="val/loss", mode=mode)] if hooks else []
        trainer = quiet(run_dir=f"runs/{name}", hooks=keep, checkpoint=True, max_epochs=2)
        trainer.fit(Net(), batches(), batches(1))
    assert export_checkpoint("runs", "best.pt", checkpoint="best").source.startswith("runs/b/")
