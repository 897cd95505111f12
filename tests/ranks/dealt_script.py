"""What each rank of a job sees of its data, in many small runs. Run by torchrun; each rank writes a line of JSON per run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import Net, batches
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hookline import Hook, HooklineError, Trainer

RANK = int(os.environ.get("RANK", "0"))


class Numbered(Dataset[Any]):
    """Sample `i` begins with `i`."""

    def __init__(self, n: int = 11, first: int = 0) -> None:
        self.n, self.first = n, first

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(self.first + index)), torch.zeros(2)


class Stream(IterableDataset[Any]):
    """The same without indices."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first

    def __iter__(self) -> Iterator[Any]:
        whole = Numbered(self.n, self.first)
        return iter([whole[index] for index in range(self.n)])


class Counting(IterableDataset[Any]):
    """Knows where it is, and that it is this rank's own."""

    shards_itself = True

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first, self.at = n, first, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.n:
            self.at += 1
            yield Numbered(self.n, self.first)[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Pairs:
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[index, index + 1] for index in range(0, 10, 2)])

    def __len__(self) -> int:
        return 5


class Seen(Hook):
    """What was trained on: by epoch and turn, the samples that count, and how many there were over all ranks by then."""

    def __init__(self, save_after: int = 0, folder: Path | None = None) -> None:
        self.turns: list[Any] = []
        self.losses: list[float] = []
        self.save_after, self.folder = save_after, folder

    def on_train_batch_end(self, trainer: Any, batch: Any, state: Any) -> None:
        counts = state.log.weight > 0
        self.turns.append(
            [state.epoch, state.batch_idx, numbers(batch) if counts else [], state.samples_seen]
        )
        if state.batches_seen == self.save_after:
            assert self.folder is not None
            trainer.save_checkpoint(self.folder)


class Tokens(Hook):
    seen = 0

    def on_train_batch_end(self, tokens_seen: int) -> None:
        self.seen = tokens_seen


def numbers(batch: Any) -> list[int]:
    return [round(float(each[0])) for each in batch[0]]


def numbered(n: int, size: int = 1) -> list[Any]:
    return [(torch.full((size, 4), float(index)), torch.zeros(size, 2)) for index in range(n)]


class Small(Net):
    """Weights that do not depend on what was made before; counts what it validates."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(lr=1e-4)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("samples", float(len(batch[0])), reduce="sum")
        return super().validation_step(batch, batch_idx)


def train(make: Callable[[], Any], *hooks: Any, **options: Any) -> dict[str, Any]:
    """Fit, and say what this rank saw and what came of it; or the error."""
    seen = hooks[0] if hooks and isinstance(hooks[0], Seen) else Seen()
    fit = {key: options.pop(key) for key in ("val", "mixture", "resume") if key in options}
    trainer = Trainer(
        **{
            "logger": False,
            "enable_progress_bar": False,
            "max_epochs": 1,
            "seed": 1,
            "num_sanity_val_steps": 0,
            "checkpoint": {"last": False},
            "hooks": [seen, *(each for each in hooks if each is not seen)],
            **options,
        }
    )
    try:
        metrics = dict(trainer.fit(Small(), make(), **fit))
    except HooklineError as error:
        return {"error": str(error)}
    return {
        "turns": seen.turns,
        "metrics": metrics,
        "samples": trainer.state.samples_seen,
        "tokens": trainer.state.tokens_seen,
        "weights": trainer.module.layer.weight.flatten().tolist(),
    }


def shuffled(n: int = 11, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Numbered(n), **{"batch_size": 2, "shuffle": True, **options})


def own_part() -> Any:
    return DataLoader(Counting(3 + 2 * RANK, 20 * RANK), 1)


def mixture() -> dict[str, Any]:
    return {
        "web": DataLoader(Numbered(15), 2, shuffle=True),
        "code": [(x + 100, y) for x, y in numbered(5, 2)],
    }


def main(folder: Path) -> None:
    """Every run once; the names are what the tests ask for."""
    world = int(os.environ["WORLD_SIZE"])
    data, told = Numbered(11), (folder / f"told-{world}-{RANK}.jsonl").open("w")

    def tell(name: str, *given: Any, **options: Any) -> None:
        print(json.dumps([name, train(*given, **options)]), file=told, flush=True)

    tell("shuffled", shuffled(), max_epochs=2, val=DataLoader(Numbered(7), 2))
    tell("workers", shuffled(num_workers=1), prefetch_batches=2)
    tell("batch sampler", lambda: DataLoader(Numbered(10), batch_sampler=Pairs()))  # type: ignore[arg-type]
    tell("whole batches", lambda: numbered(2 * world + 1, 3), val=numbered(world + 1))
    tell("stream", lambda: DataLoader(Stream(4 * world + 1), 2))
    tell(
        "own parts",
        own_part,
        Seen(4, folder / f"own-{world}"),
        val=DataLoader(Counting(1 + 2 * RANK, 20 * RANK), 1),
    )
    tell("own parts, resumed", own_part, resume=folder / f"own-{world}")
    tell(
        "sampler",
        lambda: DataLoader(data, 2, sampler=DistributedSampler(data, world, RANK, seed=5)),
        max_epochs=2,
    )
    tell("dropped", shuffled(drop_last=True), val=DataLoader(Numbered(7), 2, drop_last=True))
    tell("limited", shuffled(100), limit_train_batches=3)
    tell("tokens", lambda: batches(2 * world + 1, 3), Seen(), Tokens())
    tell("mixed", mixture, Seen(2, folder / f"mixed-{world}"), Tokens())
    tell("mixed, resumed", mixture, Seen(), Tokens(), resume=folder / f"mixed-{world}")
    tell("cut", shuffled(23), Seen(2, folder / f"cut-{world}"), max_epochs=2)
    tell("cut, resumed", shuffled(23), resume=folder / f"cut-{world}", max_epochs=2)
    tell("cut stream", lambda: DataLoader(Stream(23), 2), Seen(2, folder / f"stream-{world}"))
    if world == 2:
        tell("from one", shuffled(23), resume=folder / "cut-1", max_epochs=2)
    else:
        tell("more ranks", shuffled(23), resume=folder / "cut-2", max_epochs=2)
        tell("more ranks, stream", lambda: DataLoader(Stream(23), 2), resume=folder / "stream-2")
        tell("more ranks, mixed", mixture, Seen(), resume=folder / "mixed-2")
    tell("other lengths", lambda: numbered(4 * world + RANK))
    tell("other generators", shuffled(generator=torch.Generator().manual_seed(RANK)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
