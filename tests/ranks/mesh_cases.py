"""Four ranks on meshes with tensor parallelism. Run by test_meshes.py under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from ranks.equal_cases import Norms
from ranks.worlds import RANK, Batch, Own, distance, fit, in_float32, pairs, quiet, report, whole
from thorough import some
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric

from hookline import DDP, FSDP, Hook, Module
from hookline.checkpoint.files import read, read_manifest
from hookline.hooks import GradientMonitor

EQUAL_OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "clipped": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    "clipped by value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
}
MESHES: dict[str, Any] = {
    "2 x 2": lambda: FSDP(tensor_parallel=2),
    "own 2 x 2": lambda: FSDP(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))),
    "1 x 4": lambda: FSDP(tensor_parallel=4),
    "2 x 1 x 2": lambda: FSDP(replicas=2, tensor_parallel=2),
}

EQUAL_CASES: dict[str, list[str]] = {
    "2 x 2": some(["clipped"], ["as it is", "clipped by value"]),
    "own 2 x 2": some([], ["clipped"]),
    "1 x 4": ["clipped"],
    "2 x 1 x 2": some([], ["clipped"]),  # resumed by default
}
RESUMED: dict[str, list[str]] = {
    "2 x 2": some([], ["single", "1 x 4", "2 x 2", "4", "ddp"]),  # by default in a window
    "4": ["2 x 2"],
    "single": ["2 x 2"],
    "ddp": some([], ["2 x 1 x 2"]),
}
"""By the mesh of a saved run: those on which it continues."""
IN_A_WINDOW: list[str] = ["single", "1 x 4", "2 x 1 x 2", *some([], ["2 x 2"])]
"""Those on which a run continues that was saved on 2 x 2 in an open accumulation window."""


class Block(nn.Module):
    """Two layers that tensor parallelism divides, and a norm that it leaves whole."""

    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, hidden, bias)
        self.down = nn.Linear(hidden, 6, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Parallel(Module):
    """A model whose blocks are divided over the tensor mesh, if there is one.

    torch takes long to choose placements for each operation on each shape: there are few of both. SGD also sees the scale of
    gradients.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block(12, True), Block(10, False)])
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(6, 2, bias=False)
        self.tags: list[Any] = []

    def configure_model(self) -> None:
        mesh, blocks = self.trainer.strategy.tensor_mesh, list[Any](self.blocks)
        if mesh is not None:
            for block in blocks:
                if block.up.out_features % mesh.size() == 0:  # 10 rows on 2 x 2 are uneven shards: 3 and 2
                    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.blocks:
            x = self.dropout(each(x))
        return self.last(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.tags.append(batch[2].tolist())
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Uneven(Parallel):
    """A model that divides ten rows, whatever the number of ranks."""

    def configure_model(self) -> None:
        block: Any = self.blocks[1]
        parallelize_module(block, self.trainer.strategy.tensor_mesh, {"up": ColwiseParallel()})


def dealt(data: list[list[Batch]]) -> list[Batch]:
    """The batches of all turns, which Hookline deals to the data-parallel ranks."""
    return [batch for turn in data for batch in turn]


def joined(data: list[list[Batch]], size: int) -> list[Batch]:
    """What one process would train on, if `size` ranks read different batches."""
    flat = dealt(data)
    turns = [flat[start : start + size] for start in range(0, len(flat), size)]
    return [
        tuple(
            torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
            for parts in zip(*turn, strict=True)
        )
        for turn in turns
    ]  # type: ignore[misc]


def equal(mesh: str, options: dict[str, Any]) -> dict[str, Any]:
    """A run on a mesh against one process: weights, norms and validation loss."""
    here, there, data = Norms(), Norms(), pairs(3)
    many, trainer = fit(
        MESHES[mesh](), dealt(data), Parallel, dealt(data), max_epochs=2, hooks=[here], **options
    )
    size = trainer.strategy.ranks.data_size
    one, alone = fit(
        "single", joined(data, size), Parallel, joined(data, size), max_epochs=2, hooks=[there], **options
    )
    return {
        "size": size,
        "weights": distance(many, one),
        "steps": [trainer.state.step, alone.state.step],
        "samples": [trainer.state.samples_seen, alone.state.samples_seen],
        "norms": max(abs(a - b) for a, b in zip(here.seen, there.seen, strict=True)),
        "val": abs(trainer.metrics["val/loss"] - alone.metrics["val/loss"]),
    }


class Sequence(Parallel):
    """The positions of a sequence are divided in the norms, and the features in the layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 6)

    def configure_model(self) -> None:
        mesh = self.trainer.strategy.tensor_mesh
        for block in self.blocks if mesh is not None else ():
            plan = {
                "": PrepareModuleInputOutput(
                    input_layouts=Replicate(),
                    desired_input_layouts=Shard(1),
                    use_local_input=True,
                    output_layouts=Shard(1),
                    desired_output_layouts=Replicate(),
                ),
                "norm": SequenceParallel(use_local_output=True),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh, plan)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(-1)).mean(1)


def sequence() -> list[float]:
    """Sequence parallelism against one process."""
    here, there, data = Norms(), Norms(), pairs(3)
    many, _ = fit(FSDP(tensor_parallel=2), dealt(data), Sequence, hooks=[here])
    one, _ = fit("single", joined(data, 2), Sequence, hooks=[there])
    return [distance(many, one), max(abs(a - b) for a, b in zip(here.seen, there.seen, strict=True))]


class Whole(Parallel):
    """Forgets to divide its layers."""

    def configure_model(self) -> None:
        pass


def divided_before() -> None:
    """The ranks of a group would read different batches."""
    module = Parallel()
    quiet(FSDP(tensor_parallel=2), max_steps=1).fit(module, dealt(pairs()))
    quiet(FSDP()).fit(module, dealt(pairs()))


class OnMeta(Parallel):
    """Made without memory."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


def made_on_meta() -> list[Any]:
    """The sums of each weight after a fit, which must be the same on all ranks, and not zero."""
    weights, _ = fit(FSDP(tensor_parallel=2), dealt(pairs(1)), OnMeta)
    return [float(each.double().abs().sum()) for each in weights.values()]


# ---- data ----------------------------------------------------------------------------------------------------


class Counted(Parallel):
    """Logs sums and a metric object, whose results would be wrong if batches counted twice."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.seen = SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log("rows", float(len(batch[0])), reduce="sum", on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        self.seen.update(len(batch[0]))
        self.log("val/rows", self.seen)
        return super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        return batch[2].tolist()


def counts(strategy: Any) -> dict[str, Any]:
    """Seven batches, so that one data-parallel rank of two has a padding batch; dropout draws random numbers."""
    data = dealt(pairs(4))[:7]
    torch.manual_seed(7)
    module, trainer = Counted(), quiet(strategy, count_tokens=lambda batch: 10 * len(batch[0]))
    tokens = Tokens()
    trainer.hooks.add(tokens)
    trainer.fit(module, data, data)
    replicated = {name: each for name, each in whole(module).items() if "seen" not in name}
    return {
        "tags": module.tags,
        "samples": trainer.state.samples_seen,
        "tokens": tokens.seen,
        "rows": trainer.metrics["rows"],
        "val rows": float(trainer.metrics["val/rows"]),
        "reduced": [trainer.strategy.reduce(1.0 + RANK // 2, op) for op in ("sum", "mean", "max")],
        "random": torch.get_rng_state().sum().item(),
        "weights": [float(each.double().sum()) for each in replicated.values()],
        "predicted": trainer.predict(module, data),
    }


class Tokens(Hook):
    """The tokens of all ranks so far."""

    seen = 0

    def on_train_batch_end(self, tokens_seen: int) -> None:
        self.seen = tokens_seen


def weighted() -> float:
    """Windows that count samples, with batches of different sizes."""
    data = [
        tuple(part[: 1 + number % 3] if part.ndim > 1 else part for part in each)
        for number, each in enumerate(dealt(pairs(3)))
    ]
    options: dict[str, Any] = {"accumulate_by": "samples", "accumulate_grad_batches": 3}
    many, _ = fit(FSDP(tensor_parallel=2), data, Parallel, **options)
    one, _ = fit("single", data, Parallel, accumulate_by="samples", accumulate_grad_batches=6)
    return distance(many, one)


def facts() -> dict[str, float]:
    """Norms, percentiles and update ratios of each layer, over layers that are sharded in different ways."""
    data = pairs(3)

    def measured(strategy: Any, batches: Any) -> Any:
        monitor = GradientMonitor(
            log_frequency=1, percentiles=[10, 50, 90], log_histogram=True, update_ratio=True
        )
        fit(strategy, batches, Parallel, hooks=[monitor])
        return monitor.latest

    many, one = measured(FSDP(tensor_parallel=2), dealt(data)), measured("single", joined(data, 2))
    assert many.norms.keys() == one.norms.keys() == many.samples.keys()
    return {
        "total": abs(many.total - one.total),
        "norms": max(abs(many.norms[row] - one.norms[row]) for row in one.norms),
        "ratios": max(abs(many.ratios[row] - one.ratios[row]) for row in one.ratios),
        "percentiles": max(
            abs(a - b)
            for row in one.percentiles
            for a, b in zip(many.percentiles[row], one.percentiles[row], strict=True)
        ),
        "samples": max(
            (many.samples[row].sort().values - one.samples[row].sort().values).abs().max().item()
            for row in one.samples
        ),
    }


class Overflows(Hook):
    """Makes one element of one rank's shard infinite, before the scaler looks at it."""

    def __init__(self) -> None:
        self.skipped: list[int] = []

    def on_step_skipped(self, batch_idx: int) -> None:
        self.skipped.append(batch_idx)

    def on_after_backward(self, module: Any, batch_idx: int) -> None:
        if RANK == 3 and batch_idx == 2:
            module.blocks[0].up.weight.grad.to_local()[0, 0] = float("inf")


def overflow() -> list[Any]:
    """The batches whose update was skipped for an overflow, the scale and the weights."""
    hook = Overflows()
    with in_float32():
        strategy = FSDP(precision="16-mixed", tensor_parallel=2)
        weights, _ = fit(strategy, dealt(pairs(4)), Parallel, hooks=[hook])
    return [hook.skipped, strategy.precision.scaler.get_scale(), checksum(weights)]  # type: ignore[union-attr]


def skipped() -> list[Any]:
    """The batches whose update was skipped for a gradient that is not finite on one rank, and the weights."""
    hook = Overflows()
    weights, _ = fit(FSDP(tensor_parallel=2), dealt(pairs(4)), Parallel, hooks=[hook], nonfinite="skip")
    return [hook.skipped, checksum(weights)]


def checksum(weights: dict[str, Tensor]) -> float:
    """A number that is the same on ranks with the same weights."""
    return float(sum(each.double().abs().sum() for each in weights.values()))


# ---- checkpoints ---------------------------------------------------------------------------------------------


SAMPLES, GLOBAL_BATCH = 32, 8
PLACES: dict[str, tuple[Any, int]] = {
    "2 x 2": (lambda: FSDP(tensor_parallel=2), 2),
    "1 x 4": (lambda: FSDP(tensor_parallel=4), 1),
    "2 x 1 x 2": (lambda: FSDP(replicas=2, tensor_parallel=2), 2),
    "4": (FSDP, 4),
    "ddp": (DDP, 4),
    "single": (lambda: "single", 1),
}
"""Where a run may be saved or resumed, and how many ranks read different batches there."""


class Numbered(Dataset[Any]):
    """Samples with their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.randn(2, generator=generator), torch.tensor([index])


class Moments(Parallel):
    """The same with an optimizer that has several values for each weight."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SaveOnce(Hook):
    """Saves in the middle of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == 3:
            trainer.save_checkpoint(self.path)


class Restored(Hook):
    """What a resumed run begins with."""

    found: Any = None

    def on_fit_start(self, module: Any, trainer: Any) -> None:
        self.found = contents(module, trainer)


def contents(module: Any, trainer: Any) -> dict[str, Tensor]:
    """The whole weights and moments, by the names of the parameters."""
    state = trainer.state.optimizers[0].state
    moments = {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, parameter in module.named_parameters()
        for key, value in state[parameter].items()
    }
    return {**whole(module), **{name: each.detach().clone() for name, each in moments.items()}}


def run_at(
    place: str,
    run_dir: str,
    make_module: Callable[[], Parallel],
    save: str | None = None,
    resume: str | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], list[int], Any]:
    """Train at a place; the contents at the end, this rank's samples, and the contents at the start."""
    make, size = PLACES[place]
    trainer, restored, module = (
        quiet(make(), max_epochs=2, seed=5, run_dir=run_dir, **options),
        Restored(),
        make_module(),
    )
    trainer.hooks.add(SaveOnce(save) if save is not None else restored)
    trainer.fit(module, DataLoader(Numbered(), GLOBAL_BATCH // size, shuffle=True), resume=resume)
    return contents(module, trainer), [int(tag[0]) for tags in module.tags for tag in tags], restored.found


def save_and_resume(
    source: str, targets: list[str], folder: str, make: Callable[[], Parallel] = Moments, **options: Any
) -> dict[str, Any]:
    """A run that is saved and continues, against runs elsewhere that resume from what it saved."""
    own = RANK if source == "single" else 0  # one process on each rank
    torch.manual_seed(7)
    run_dir, path = f"{folder}/from {source} {own}", f"{folder}/{source} {own}"
    end, mine, _ = run_at(source, run_dir, make, path, **options)
    torch.distributed.barrier()
    saved = f"{folder}/{source} 0"
    whole = read(saved)
    names = [name for name, _ in make().named_parameters()]
    stored = whole["module"] | {
        f"{names[number]}.{key}": value
        for number, moments in whole["optimizers"][0]["state"].items()
        for key, value in moments.items()
    }
    found: dict[str, Any] = {"mesh": read_manifest(saved).get("mesh", ""), "samples": mine}
    options.pop("checkpoint", None)
    for target in targets:
        number = RANK if target == "single" else 0
        then, samples, begin = run_at(
            target, f"{folder}/{source} to {target} {number}", make, resume=saved, **options
        )
        assert begin.keys() == stored.keys()
        found[target] = {"begin": distance(begin, stored), "end": distance(then, end), "samples": samples}
    return found


def main() -> None:
    for mesh, names in EQUAL_CASES.items():
        for name in names:
            report(f"equal, {mesh}, {name}", lambda m=mesh, n=name: equal(m, EQUAL_OPTIONS[n]))  # type: ignore[misc]
    report("counts, 2 x 2", lambda: counts(FSDP(tensor_parallel=2)))
    report("counts, 1 x 4", lambda: counts(FSDP(tensor_parallel=4)))
    report("weighted", weighted)
    report("facts", facts)
    report("overflow", overflow)
    report("sequence", sequence)
    report("meta", made_on_meta)
    report("whole layers", lambda: fit(FSDP(tensor_parallel=2), dealt(pairs()), Whole))
    report("uneven layers", lambda: fit(FSDP(tensor_parallel=4), dealt(pairs()), Uneven))
    both = {"activation_checkpointing": True, "compile": {"blocks": True, "backend": "aot_eager"}}
    report("recomputed graphs", lambda: fit(FSDP(tensor_parallel=2), dealt(pairs()), Parallel, **both))
    report("other batches", lambda: fit(FSDP(tensor_parallel=2), Own(dealt(pairs())[RANK::4]), Parallel))
    report("other lengths", lambda: fit(FSDP(tensor_parallel=2), Own(dealt(pairs())[: 4 + RANK]), Parallel))
    report("divided before", divided_before)
    report("other mesh", lambda: fit(FSDP(tensor_parallel=2 if RANK else 4), dealt(pairs()), Parallel))
    report("skipped", skipped)
    folder = os.environ["HOOKLINE_TEST_FOLDER"]
    for source, targets in RESUMED.items():
        if targets:
            more = {"checkpoint": "async"} if source == "4" else {}
            report(
                f"resume, {source}",
                lambda s=source, t=targets, m=more: save_and_resume(s, t, folder, **m),  # type: ignore[misc]
            )
    window = {"accumulate_grad_batches": 2}  # it is open when the run is saved
    report(
        "resume in a window", lambda: save_and_resume("2 x 2", IN_A_WINDOW, f"{folder}/w", Parallel, **window)
    )


if __name__ == "__main__":
    main()
