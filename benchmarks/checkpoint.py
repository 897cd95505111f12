"""How long saving a checkpoint holds the training up, in Hookline and in others. See
README.md beside this.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from hookline.checkpoint.background import BackgroundSaver
from hookline.checkpoint.files import write

OUT = Path(__file__).resolve().parent.parent / "bench-out"
BASIS, COPY = "torch.save, then fsync", "copying the tensors, nothing else"
SYNC_AIM, ASYNC_AIM = 1.3, 1.1

Contender = Callable[[Path], Iterator[None]]
"""A generator: up to its first yield the training waits, then it goes on; at its end the checkpoint is there.
"""


def make(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a transformer and an AdamW that has made a step, so that it has its two moments."""
    block = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True)
    body = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    model = nn.ModuleDict({"embedding": nn.Embedding(20_000, width), "body": body})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def contenders(model: nn.Module, optimizer: torch.optim.Optimizer, lightning: bool) -> dict[str, Contender]:
    """Return everything that is compared, by name."""

    def contents() -> dict[str, Any]:
        return {"module": model.state_dict(), "optimizers": [optimizer.state_dict()], "counters": {"step": 1}}

    def plain(path: Path) -> Iterator[None]:
        with path.open("wb") as file:
            torch.save(contents(), file)
            file.flush()
            os.fsync(file.fileno())
        yield

    def hookline_sync(path: Path) -> Iterator[None]:
        write(contents(), path)
        yield

    saver, failed = BackgroundSaver(), list[Exception | None]()

    def hookline_async(path: Path) -> Iterator[None]:
        saver.start(contents(), path, {}, failed.append)
        yield
        saver.wait()
        if failed.pop() is not None:
            raise RuntimeError("the checkpoint was not written")

    every = [each for each in _tensors(contents()) if each.numel()]
    copies = [torch.empty_like(each) for each in every]

    def copy(path: Path) -> Iterator[None]:
        for mine, its in zip(copies, every, strict=True):
            mine.copy_(its)
        path.touch()
        yield

    found: dict[str, Contender] = {
        BASIS: plain,
        "Hookline, sync": hookline_sync,
        COPY: copy,
        "Hookline, async": hookline_async,
        **_distributed(contents),
    }
    return {**found, **_lightning(model, optimizer)} if lightning else found


def _distributed(contents: Callable[[], dict[str, Any]]) -> dict[str, Contender]:
    """Return two contenders: the default, and one that keeps the memory of its copy between saves."""
    from torch.distributed.checkpoint import FileSystemWriter, async_save
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    kept = DefaultStager(StagingOptions(False, False, False, False))  # everything else needs an accelerator

    def saving(stager: Any) -> Contender:
        def save(path: Path) -> Iterator[None]:
            future: Any = async_save(contents(), storage_writer=FileSystemWriter(path), async_stager=stager)
            yield
            future.result()

        return save

    return {
        "torch.distributed.checkpoint async_save": saving(None),
        "async_save with a DefaultStager": saving(kept),
    }


def _lightning(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Contender]:
    """Return a trainer that has made a step and holds the same model and the same optimizer."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Wrapped(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(each.mean() for each in self.parameters())

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Wrapped(), torch.utils.data.DataLoader(range(1)))  # type: ignore[arg-type]
    optimizer.zero_grad()

    def save(path: Path) -> Iterator[None]:
        trainer.save_checkpoint(path, weights_only=False)
        yield

    return {"Lightning, trainer.save_checkpoint": save}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


def measure(every: dict[str, Contender], rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds that the training waits, and until the save is done, of every contender in every
    round, in changing order.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
    for turn in range(rounds + 1):  # the first warms up
        for name in random.sample(list(every), len(every)):
            path = folder / f"{turn}"
            gc.collect()
            os.sync()  # what others have left in the system's memory is not this one's to write
            saving = every[name](path)
            start = time.perf_counter()
            next(saving)
            waited = time.perf_counter() - start
            for _ in saving:
                pass
            if turn:
                taken[name].append((waited, time.perf_counter() - start))
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if sys.stderr.isatty():
            print(
                f"\rround {turn} of {rounds}", end="\n" if turn == rounds else "", file=sys.stderr, flush=True
            )
    return taken


def rows(taken: dict[str, list[tuple[float, float]]]) -> list[list[str]]:
    """Return medians; ratios are taken within each round, so that a machine that slows down favours none."""

    def against(name: str, basis: str) -> str:
        found = [mine[0] / its[0] for mine, its in zip(taken[name], taken[basis], strict=True)]
        return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    made = []
    for name, times in taken.items():
        waited, whole = (statistics.median(column) for column in zip(*times, strict=True))
        copied = against(name, COPY) if "async" in name else ""
        made.append([name, f"{waited:.3f}", f"{whole:.3f}", against(name, BASIS), copied])
    return made


def main() -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured (7)")
    parser.add_argument(
        "--layers",
        type=int,
        default=12,
        help="of the transformer (12: about 100 M parameters with --width 768)",
    )
    parser.add_argument("--width", type=int, default=768, help="of the transformer (768), a multiple of 64")
    parser.add_argument("--quick", action="store_true", help="2 layers and 3 rounds: a first impression")
    parser.add_argument("--hookline-only", action="store_true", help="leave Lightning out")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured (the system's place for temporary files)"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")  # of Lightning and torch.distributed, about this being no real training
    layers, rounds = (2, 3) if arguments.quick else (arguments.layers, arguments.rounds)
    model, optimizer = make(layers, arguments.width)
    every = contenders(model, optimizer, lightning=not arguments.hookline_only)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        taken = measure(every, rounds, Path(folder))
    count = sum(each.numel() for each in model.parameters())
    title = (
        f"{count / 1e6:.0f} M parameters with AdamW, {count * 12 / 1e9:.2f} GB; median of {rounds} "
        f"rounds, range in brackets"
    )
    heads = ["", "training waits, s", "durable after, s", "wait / torch.save", "wait / the copy"]
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    found = rows(taken)
    for row in found:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 128)
    console.print(table)
    lines = [
        f"# Saving a checkpoint\n\n{title}. torch {torch.__version__}.\n",
        "| " + " | ".join(heads) + " |",
        "|---|" + "---:|" * 4,
        *("| " + " | ".join(row) + " |" for row in found),
    ]
    OUT.mkdir(exist_ok=True)
    (OUT / "checkpoint.md").write_text("\n".join(lines) + "\n")
    print(f"Aims of Hookline: sync at most {SYNC_AIM} x torch.save, async at most {ASYNC_AIM} x the copy.")
    print(f"Written to {OUT.name}: checkpoint.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
