"""Exports read back by transformers and ONNX Runtime, and what transformers saved, imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hookline
from hookline import Module, Trainer, export_checkpoint, import_checkpoint, load_weights
from hookline.cli import main


def tiny_llama(tied: bool = True) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=tied,
        )
    )


class Tuned(Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()

    def training_step(self, batch: Any) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that has trained a model of transformers, and the model."""
    run_dir = tmp_path_factory.mktemp("tuned") / "run"
    torch.manual_seed(0)
    module = Tuned()
    options: Any = {"logger": False, "enable_progress_bar": False, "max_steps": 2}
    Trainer(run_dir=run_dir, **options).fit(module, [torch.arange(12).reshape(2, 6) % 16] * 2)
    return run_dir, module.model


def same(one: nn.Module, other: nn.Module) -> bool:
    others = other.state_dict()
    return one.state_dict().keys() == others.keys() and all(
        torch.equal(value, others[name]) for name, value in one.state_dict().items()
    )


@pytest.mark.parametrize("size", ["1KB", "5GB"])
def test_transformers_loads_a_sharded_export(size: str, run: Any) -> None:
    run_dir, model = run
    assert main(["checkpoint", "export", str(run_dir), "hf", "--format", "hf-sharded", "--prefix", "model.", "--shard-size", size]) == 0  # fmt: skip
    files = {each.name for each in Path("hf").iterdir()}
    assert ("model.safetensors.index.json" in files) == (size == "1KB") != ("model.safetensors" in files)
    model.config.save_pretrained("hf")
    loaded, report = LlamaForCausalLM.from_pretrained("hf", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(loaded, model) and loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_shards_are_those_that_transformers_would_write(tied: bool) -> None:
    model = tiny_llama(tied)
    model.save_pretrained("theirs", max_shard_size="1KB")
    export_checkpoint(model.state_dict(), "ours", "hf-sharded", shard_size="1KB")
    theirs, ours = (import_checkpoint(path).weights for path in ("theirs", "ours"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
    count = len(list(Path("theirs").glob("model-*.safetensors")))
    assert len(list(Path("ours").glob("model-*.safetensors"))) == count > 2


@pytest.mark.parametrize("size", ["1KB", "5GB"])
def test_what_transformers_saved_is_a_source_of_weights(size: str) -> None:
    model = tiny_llama()
    model.save_pretrained("theirs", max_shard_size=size)
    for source in ("theirs", import_checkpoint("theirs")):
        assert load_weights(other := tiny_llama(), source).complete and same(other, model)
    wrapped = Tuned()
    assert load_weights(wrapped, "theirs", rename={"": "model."}).complete and same(wrapped.model, model)
    assert main(["checkpoint", "import", "theirs", "imported"]) == 0
    assert load_weights(third := tiny_llama(), "imported").complete and same(third, model)


def test_a_missing_shard_of_transformers_is_named() -> None:
    tiny_llama().save_pretrained("theirs", max_shard_size="1KB")
    lost = sorted(Path("theirs").glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(hookline.CheckpointError, match=f"{lost.name} is missing"):
        load_weights(tiny_llama(), "theirs")


# ---- ONNX --------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Classifier]:
    run_dir = tmp_path_factory.mktemp("classified") / "run"
    torch.manual_seed(0)
    net = Classifier()
    data = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    options: Any = {"logger": False, "enable_progress_bar": False, "max_steps": 3}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Trainer(run_dir=run_dir, **options).fit(net, data, loss=nn.functional.cross_entropy, optimizer=optimizer)
    return run_dir, net.eval()


def test_onnx_runtime_computes_what_the_module_does_for_any_batch(classifier: Any) -> None:
    run_dir, net = classifier
    other = Classifier()
    before = {name: each.clone() for name, each in other.state_dict().items()}
    export_checkpoint(run_dir, "net.onnx", module=other, example=torch.randn(2, 4), dynamic_batch=True)
    assert other.training and all(
        torch.equal(value, before[name]) for name, value in other.state_dict().items()
    )
    session = onnxruntime.InferenceSession("net.onnx")
    (taken,) = session.get_inputs()
    assert taken.shape == ["batch", 4]
    for size in (1, 5):
        inputs = torch.randn(size, 4)
        (found,) = session.run(None, {taken.name: inputs.numpy()})
        np.testing.assert_allclose(found, net(inputs).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert [each.name for each in Path().iterdir()] == ["net.onnx"]


def test_a_fixed_batch_is_fixed_and_a_module_that_cannot_be_traced_is_explained(classifier: Any) -> None:
    run_dir, _ = classifier
    export_checkpoint(run_dir, "net.onnx", "onnx", module=Classifier(), example=torch.randn(2, 4))
    assert onnxruntime.InferenceSession("net.onnx").get_inputs()[0].shape == [2, 4]

    class Branches(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)) if x.sum() > 0 else x

    with pytest.raises(
        hookline.CheckpointError, match=r"Branches.forward could not be exported as onnx: \w+"
    ):
        export_checkpoint(run_dir, "other.onnx", module=Branches(), example=torch.randn(2, 4))
    assert [each.name for each in Path().iterdir()] == ["net.onnx"]


def test_onnx_is_exported_from_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cli.configured import PARTS, RUN

    (tmp_path / "onnx_parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text(RUN.replace("cli_parts", "onnx_parts"))
    assert main(["fit", "run.toml", "--trainer.run_dir", "run", "--trainer.max_epochs", "1"]) == 0
    assert main(["checkpoint", "export", "run", "net.onnx", "--config", "run.toml", "--dynamic-batch"]) == 0
    assert "wrote net.onnx" in capsys.readouterr().out
    session = onnxruntime.InferenceSession("net.onnx")
    assert session.run(None, {session.get_inputs()[0].name: np.ones((3, 4), np.float32)})[0].shape == (3, 2)
