"""Small data in the formats of the data libraries, a loader for each, and a process that trains on it.

`python -c "from interop.libraries import main; main()" REQUEST` trains one run; `tests/interop/test_data_libraries.py` starts it.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # every optimizer imports it; here the server of preloaded processes does
import webdataset
from datasets import Dataset, load_dataset
from datasets.distributed import split_dataset_by_node
from litdata import CombinedStreamingDataset
from litdata import StreamingDataLoader as LitLoader
from litdata import StreamingDataset as LitDataset
from litdata.streaming.writer import BinaryWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset
from torchdata.stateful_dataloader import StatefulDataLoader

sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))  # needs torchvision
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402

from hookline import Hook, Module, Trainer  # noqa: E402
from hookline.util.errors import OptionError  # noqa: E402

COUNT, BATCH, SHARDS = 24, 4, 4
PER_EPOCH = COUNT // BATCH


def ranks() -> tuple[int, int]:
    """The rank and the number of ranks; this module is imported before they are known."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def write(folder: Path) -> None:
    """Write the same samples in every format."""
    per_shard = COUNT // SHARDS
    for name in ("mds", "mds-val"):
        with MDSWriter(out=str(folder / name), columns={"id": "int"}, size_limit=120) as mds:
            for number in range(COUNT):
                mds.write({"id": number})
    lit = BinaryWriter(str(folder / "lit"), chunk_size=per_shard)
    for number in range(COUNT):
        lit[number] = {"id": number}
    lit.done()
    lit.merge()
    (folder / "tar").mkdir()
    (folder / "parquet").mkdir()
    with webdataset.ShardWriter(str(folder / "tar" / "%d.tar"), maxcount=per_shard, verbose=0) as tar:
        for number in range(COUNT):
            tar.write({"__key__": f"{number:03d}", "id": number})
    for shard in range(SHARDS):
        rows = list(range(shard * per_shard, (shard + 1) * per_shard))
        Dataset.from_dict({"id": rows}).to_parquet(folder / "parquet" / f"{shard}.parquet")


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = torch.tensor([int(each["id"]) for each in samples])
    noise = torch.tensor([float(each.get("noise", 0)) for each in samples])
    inputs = torch.stack([torch.sin(ids * (1.0 + each)) for each in range(4)], 1) + noise[:, None]
    return {"id": ids, "x": inputs, "y": inputs[:, :2] * 2}


# ---- a loader of each library ------------------------------------------------------------------------------------


class Rows(TorchDataset[Any]):
    def __init__(self, noise: bool = False) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return {"id": index, "noise": torch.rand(()).item() + random.random() if self.noise else 0}


class Stateful(IterableDataset[Any]):
    """A stream with a state, which each worker reads a part of."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        own = list(range(COUNT))[info.id :: info.num_workers] if info else list(range(COUNT))
        while self.at < len(own):
            self.at += 1
            yield {"id": own[self.at - 1]}
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def torchdata(
    folder: Path,
    shuffle: bool,
    stream: bool = False,
    noise: bool = False,
    generator: bool = False,
    **given: Any,
) -> Any:
    if stream:
        return StatefulDataLoader(Stateful(), BATCH, collate_fn=collate, **given)
    own = {"generator": torch.Generator().manual_seed(3)} if generator else {}
    return StatefulDataLoader(Rows(noise), BATCH, shuffle=shuffle, collate_fn=collate, **own, **given)


def hf_rows(folder: Path, shuffle: bool, split: bool = False, **given: Any) -> Any:
    rows = Dataset.from_dict({"id": list(range(COUNT))})
    if split:
        rows = split_dataset_by_node(rows, *ranks())
    return DataLoader(rows, BATCH, shuffle=shuffle, collate_fn=collate, **given)  # type: ignore[arg-type]


def hf_stream(
    folder: Path,
    shuffle: bool,
    buffer: int = 8,
    seed: int | None = 1,
    parquet: bool = False,
    stateful: bool = False,
    batched: bool = False,
    split: str = "own",
    **given: Any,
) -> Any:
    if parquet:
        files = str(folder / "parquet" / "*.parquet")
        stream: Any = load_dataset(
            "parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
        )
    else:
        stream = Dataset.from_dict({"id": list(range(COUNT))}).to_iterable_dataset(num_shards=SHARDS)
    if shuffle:
        stream = stream.shuffle(seed=seed, buffer_size=buffer)
    rank, world_size = ranks()
    if world_size > 1 and split != "none":
        stream = split_dataset_by_node(stream, rank if split == "own" else 0, world_size)
    if batched:
        return stream.map(batched_sample).batch(BATCH).with_format("torch")
    kind: Any = StatefulDataLoader if stateful else DataLoader
    return kind(stream, BATCH, collate_fn=collate, **given)


def batched_sample(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value[0] for name, value in collate([row]).items()}


def mosaicml(
    folder: Path, shuffle: bool, plain: bool = False, val: bool = False, size: int = BATCH, **given: Any
) -> Any:
    dataset = StreamingDataset(
        local=str(folder / ("mds-val" if val else "mds")),
        shuffle=shuffle,
        shuffle_seed=7,
        batch_size=size,
        num_canonical_nodes=1,
    )
    kind: Any = DataLoader if plain else StreamingDataLoader
    return kind(dataset, batch_size=BATCH, collate_fn=collate, **given)


def litdata(folder: Path, shuffle: bool, plain: bool = False, combined: bool = False, **given: Any) -> Any:
    dataset: Any = LitDataset(str(folder / "lit"), shuffle=shuffle, seed=5)
    if combined:
        other = LitDataset(str(folder / "lit"), shuffle=shuffle, seed=6)
        dataset = CombinedStreamingDataset(
            [dataset, other], seed=3, weights=[0.5, 0.5], iterate_over_all=False
        )
    if plain:
        return DataLoader(dataset, BATCH, collate_fn=collate, **given)
    return LitLoader(dataset, batch_size=BATCH, collate_fn=collate, **given)


def wds(
    folder: Path,
    shuffle: bool,
    seeded: bool = True,
    web: bool = False,
    batched: bool = False,
    split: bool = True,
    **given: Any,
) -> Any:
    own = {"nodesplitter": webdataset.split_by_node} if split else {}
    files = [str(folder / "tar" / f"{shard}.tar") for shard in range(SHARDS)]
    stream = webdataset.WebDataset(files, shardshuffle=False, **own)
    if shuffle:
        stream = stream.shuffle(8, **({"rng": random.Random(3)} if seeded else {}))
    stream = stream.decode()
    if batched:
        return stream.batched(BATCH, collation_fn=collate)
    if web:
        return webdataset.WebLoader(stream, batch_size=BATCH, collate_fn=collate, **given)
    return DataLoader(stream, BATCH, collate_fn=collate, **given)


LOADERS: dict[str, Callable[..., Any]] = {
    "torchdata": torchdata,
    "hf_rows": hf_rows,
    "hf_stream": hf_stream,
    "mosaicml": mosaicml,
    "litdata": litdata,
    "wds": wds,
}


# ---- a run -------------------------------------------------------------------------------------------------------


class Net(Module):
    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.make = make
        self.validated: list[list[int]] = []

    def train_dataloader(self) -> Any:
        assert self.make is not None
        return self.make()

    def training_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.layer(batch["x"]), batch["y"])

    def validation_step(self, batch: Any) -> Any:
        self.validated.append(batch["id"].tolist())
        return nn.functional.mse_loss(self.layer(batch["x"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Record(Hook):
    """Writes the samples of each batch, saves a checkpoint after one of them, and kills the process before another."""

    def __init__(self, path: Path, save: int | None = None, kill: int | None = None) -> None:
        self.file = path.open("w")
        self.save, self.kill = save, kill

    def on_train_batch_start(self, batches_seen: int) -> None:
        if batches_seen == self.kill:
            # its workers, too: they look every 5 s whether their process is there, and hold its output open
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for worker in multiprocessing.active_children():
                worker.kill()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, batch: Any, batches_seen: int) -> None:
        self.file.write(json.dumps(batch["id"].tolist()) + "\n")
        self.file.flush()
        if batches_seen == self.save:
            trainer.save_checkpoint()


def train(
    source: Any, folder: Path, name: str, directory: str, resume: str | None = None, save: int | None = None,
    kill: int | None = None, val: Any = None, **options: Any,
) -> Net:  # fmt: skip
    """Train on a source; leave the samples and the weights in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"{name}.log", "w")
    logging.getLogger("hookline").addHandler(handler)
    torch.manual_seed(0)
    module = Net(source if callable(source) else None)
    trainer = Trainer(
        hooks=[Record(folder / f"{name}.samples", save, kill)],
        run_dir=folder / directory,
        **{
            "max_epochs": 3,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_progress_bar": False,
            "checkpoint": {"last": False},
            **options,
        },
    )
    try:
        trainer.fit(module, None if module.make else source, val, resume=resume)
    finally:
        logging.getLogger("hookline").removeHandler(handler)
    weights = [float(each).hex() for each in torch.cat([each.flatten() for each in module.parameters()])]
    (folder / f"{name}.weights").write_text(json.dumps(weights))
    (folder / f"{name}.validated").write_text(json.dumps(module.validated))
    return module


def main() -> None:
    """Train the run that the last argument describes."""
    request = json.loads(sys.argv[-1])
    torch.set_num_threads(1)
    np.random.seed(os.getpid() % 1000)  # an unseeded shuffle may use it
    data, loader = Path(request.pop("data")), request.pop("loader")
    kind, given = loader.pop("kind"), loader
    val = None
    if request.pop("validates", False):
        val = LOADERS[kind](data, **given, **({"val": True} if kind == "mosaicml" else {}))
    folder = Path(request.pop("folder"))
    train(LOADERS[kind](data, **given), folder, val=val, **request)


# ---- two ranks ---------------------------------------------------------------------------------------------------


SHARDED: dict[str, dict[str, Any]] = {
    "torchdata": {"kind": "torchdata", "generator": True},
    "torchdata workers": {"kind": "torchdata", "generator": True, "num_workers": 2},
    "hf_rows": {"kind": "hf_rows"},
    "hf_stream": {"kind": "hf_stream"},
    "hf_stream not split": {"kind": "hf_stream", "split": "none"},
    "hf_stream in order": {"kind": "hf_stream", "shuffle": False},
    "mosaicml": {"kind": "mosaicml"},
    "mosaicml workers": {"kind": "mosaicml", "num_workers": 2},
    "litdata": {"kind": "litdata"},
    "wds": {"kind": "wds"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "wds with the default nodesplitter": {"kind": "wds", "split": False},
    "hf_stream split for another rank": {"kind": "hf_stream", "split": "first"},
}


def rank_cases(data: Path, folder: Path) -> None:
    """Train with each library on these ranks, resume from the middle of the second epoch, and print what each rank saw."""
    rank, _ = ranks()
    made_early = LitDataset(str(data / "lit"), shuffle=True, seed=5)

    def show(name: str, found: Any) -> None:
        print("CASE", json.dumps([name, rank, found]), flush=True)

    def attempt(name: str, source: Any) -> None:
        try:
            train(source, folder / name, f"rank-{rank}", "run", strategy="ddp", device="cpu")
        except OptionError as error:
            show(name, str(error))

    # the ranks are not connected yet, as in a script that makes its loader before the trainer fits
    attempt("litdata made early", LitLoader(made_early, batch_size=BATCH, collate_fn=collate))
    for name, given in REFUSED.items():
        attempt(name, LOADERS[given["kind"]](data, True, **{k: v for k, v in given.items() if k != "kind"}))
    attempt("torchdata with a seed of each rank", lambda: torchdata(data, True))
    for name, given in SHARDED.items():
        options = {"shuffle": True, **given}
        kind = options.pop("kind")

        def make(kind: str = kind, options: dict[str, Any] = options) -> Any:
            gc.collect()  # MosaicML's dataset refuses the directory of another one
            return LOADERS[kind](data, **options)

        own = {"strategy": "ddp", "device": "cpu", "max_epochs": 3}
        train(make, folder / name, f"whole-{rank}", "whole", save=4, **own)
        path = str(next((folder / name / "whole" / "checkpoints").glob("step-*")))
        train(make, folder / name, f"rest-{rank}", "rest", resume=path, **own)
    split = hf_rows(data, True, split=True)
    train(split, folder / "split", f"whole-{rank}", "whole", strategy="ddp", device="cpu")
