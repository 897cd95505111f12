"""Files of other tools: their weights and what else is plain in them; what would have to be run is refused."""

from __future__ import annotations

import os
import pickle
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches
from torch import nn

from hookline import CheckpointError, import_checkpoint, load_weights


def lightning_file(net: nn.Module, path: str) -> None:
    """A .ckpt: by Lightning itself if it is there, else laid out as Lightning 2.6 does."""
    if find_spec("lightning") is not None:
        import lightning

        class Host(lightning.LightningModule):
            def __init__(self, width: int = 4) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.layer = net.layer

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer(batch[0]).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters())

        with warnings.catch_warnings(action="ignore"):
            trainer = lightning.Trainer(
                max_epochs=2,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                accelerator="cpu",
            )
            trainer.fit(Host(), torch.utils.data.DataLoader(batches(3), batch_size=None))  # type: ignore[arg-type]
            trainer.save_checkpoint(path)
        return
    optimizer = torch.optim.AdamW(net.parameters())
    for inputs, _ in batches(3) * 2:
        net.layer(inputs).sum().backward()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
    progress = {
        "total": {"ready": 6, "completed": 6},
        "current": {"ready": 3, "completed": 3},
        "is_last_batch": True,
    }
    torch.save(
        {
            "epoch": 2,
            "global_step": 6,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": net.state_dict(),
            "loops": {"fit_loop": {"state_dict": {}, "epoch_loop.batch_progress": progress}},
            "callbacks": {
                "EarlyStopping{'monitor': 'loss', 'mode': 'min'}": {
                    "wait_count": 0,
                    "best_score": torch.tensor(1.5),
                }
            },
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [],
            "hparams_name": "kwargs",
            "hyper_parameters": {"width": 4},
        },
        path,
    )


def test_a_lightning_checkpoint_gives_its_weights_and_what_is_plain_in_it() -> None:
    net, again = Net(), Net()
    lightning_file(net, "epoch=1-step=6.ckpt")
    found = import_checkpoint("epoch=1-step=6.ckpt")
    assert (found.step, found.epoch, found.hparams) == (6, 2, {"width": 4})
    assert set(found.optimizers[0]) == {"state", "param_groups"}
    assert "pytorch-lightning_version" in found.contents
    assert str(found).startswith("epoch=1-step=6.ckpt: 2 weights (10 numbers), step 6, epoch 2")
    assert load_weights(again, found).source == "epoch=1-step=6.ckpt"
    assert torch.equal(again.layer.weight, net.layer.weight)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module", None])
@pytest.mark.parametrize("as_zip", [True, False])
def test_weights_are_found_where_tools_keep_them(key: str | None, as_zip: bool) -> None:
    weights = Net().state_dict()
    torch.save(
        {key: weights, "epoch": 3, "optimizer": {"state": {}}} if key else weights,
        "x.pt",
        _use_new_zipfile_serialization=as_zip,
    )
    found = import_checkpoint(Path("x.pt"))
    assert torch.equal(found.weights["layer.weight"], weights["layer.weight"])
    assert found.epoch == (3 if key else None) and found.step is None
    assert found.optimizers == ([{"state": {}}] if key else [])


def test_weights_elsewhere_are_asked_for_by_their_key() -> None:
    torch.save({"ema": Net().state_dict(), "steps": [1], "loss": torch.ones(())}, "x.pt")
    with pytest.raises(
        CheckpointError, match=r"x.pt has no weights under .* It has: ema, steps, loss. .*weights=KEY"
    ):
        import_checkpoint("x.pt")
    assert set(import_checkpoint("x.pt", weights="ema").weights) == {"layer.weight", "layer.bias"}
    with pytest.raises(CheckpointError, match="has no 'emma'. Did you mean 'ema'"):
        import_checkpoint("x.pt", weights="emma")
    with pytest.raises(CheckpointError, match="'steps' in x.pt is not a table of named tensors"):
        import_checkpoint("x.pt", weights="steps")


class Attack:
    """Unpickled by an ordinary reader, it leaves a file."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        (Attack(os.system, "touch executed"), r"(posix|nt)\.system"),
        (Attack(eval, "open('executed', 'w').close()"), "eval"),
    ],
)
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_malicious_file_is_refused_and_nothing_in_it_is_run(
    attack: Attack, named: str, as_zip: bool
) -> None:
    torch.save(
        {"state_dict": Net().state_dict(), "extra": attack},
        "evil.ckpt",
        _use_new_zipfile_serialization=as_zip,
    )
    with pytest.raises(
        CheckpointError, match=rf"no code from it was run: it requests {named}, .*do not trust this file"
    ):
        import_checkpoint("evil.ckpt")
    assert not Path("executed").exists()
    torch.load("evil.ckpt", weights_only=False)
    assert Path("executed").exists()  # it was a real one


def test_a_plain_pickle_is_refused_and_nothing_in_it_is_run() -> None:
    for protocol in (2, 4):
        Path("evil.pkl").write_bytes(pickle.dumps(Attack(os.system, "touch executed"), protocol))
        with pytest.raises(CheckpointError, match="evil.pkl"):
            import_checkpoint("evil.pkl")
    assert not Path("executed").exists()


def test_a_file_that_needs_a_class_says_which_and_what_to_do() -> None:
    torch.save({"state_dict": Net().state_dict(), "where": Path("x")}, "x.ckpt")
    kind = type(Path())  # of a module that is not the same in every Python
    with pytest.raises(
        CheckpointError,
        match=rf"requests {kind.__module__}\.{kind.__name__}, .*only the weights.*safe_globals",
    ):
        import_checkpoint("x.ckpt")
    with torch.serialization.safe_globals([kind]):
        assert import_checkpoint("x.ckpt").contents["where"] == Path("x")
    torch.save(Net(), "whole.pt")
    with pytest.raises(CheckpointError, match=r"requests tiny\.Net"):
        import_checkpoint("whole.pt")


def test_half_a_file_is_no_checkpoint_wherever_it_is_cut() -> None:
    lightning_file(Net(), "whole.ckpt")
    data = Path("whole.ckpt").read_bytes()
    for part in (0, 1, 10, len(data) // 3, len(data) // 2, len(data) - 30, len(data) - 1):
        Path("half.ckpt").write_bytes(data[:part])
        with pytest.raises(
            CheckpointError,
            match="half.ckpt cannot be imported: it is not a torch.save file, or it is incomplete",
        ):
            import_checkpoint("half.ckpt")


@pytest.mark.parametrize("data", [b"hello world", b"\x80\x02.", b"PK\x03\x04 and so on", b'{"json": true}'])
def test_what_is_no_checkpoint_is_refused_by_name(data: bytes) -> None:
    Path("other.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="other.pt cannot be imported"):
        import_checkpoint("other.pt")


def test_what_holds_no_weights_says_what_it_holds() -> None:
    torch.save([1, 2], "list.pt")
    with pytest.raises(CheckpointError, match="list.pt contains a list, not a table of named weights"):
        import_checkpoint("list.pt")
    torch.save({}, "empty.pt")
    with pytest.raises(CheckpointError, match="empty.pt has no weights.*It has: nothing"):
        import_checkpoint("empty.pt")


def test_what_needs_no_import_is_sent_to_the_right_place() -> None:
    Path("made").mkdir()
    with pytest.raises(
        CheckpointError, match=r"made is a directory.*fit\(resume='made'\).*load_weights\(module, 'made'\)"
    ):
        import_checkpoint("made")
    with pytest.raises(CheckpointError, match="x.safetensors does not exist"):
        import_checkpoint("x.safetensors")
    with pytest.raises(CheckpointError, match="is a URL: copy"):
        import_checkpoint("s3://bucket/x.ckpt")
    with pytest.raises(CheckpointError, match="gone.pt does not exist"):
        import_checkpoint("gone.pt")
