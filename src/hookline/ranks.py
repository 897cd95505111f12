"""What the processes of a run say to each other: plain data, on a process group of its own, never by pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

INT = torch.int64


class Ranks:
    """This process among those of the run. One process has nobody to talk to: every answer is its own.

    Everything here goes over the control group, so that it never interleaves with what the model's own groups send.
    All ranks must call the same things in the same order.
    """

    def __init__(self, rank: int = 0, local_rank: int = 0, world_size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.group = group
        """The control group, on gloo whatever the model uses."""

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.group is None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks, on every rank. Waits for all."""
        if self.group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=INT) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(mine)], dtype=INT), group=self.group)
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, padded, group=self.group)
        return [json.loads(bytes(text[: int(n)].tolist())) for text, n in zip(texts, lengths, strict=True)]

    def from_zero(self, value: Any) -> Any:
        """Rank zero's value, on every rank. Waits for all."""
        return self.gather(value if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def largest(self, values: Sequence[int]) -> Largest:
        """Begin to find each number's largest over all ranks; nobody waits until the answer is read."""
        numbers = torch.tensor(values, dtype=INT)
        work = None if self.group is None else dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return Largest(numbers, work)


class Largest:
    """An answer that is on its way."""

    __slots__ = ("_numbers", "_work")

    def __init__(self, numbers: Tensor, work: Any) -> None:
        self._numbers = numbers
        self._work = work

    def read(self) -> list[int]:
        """The answer; waits for it if it has not come yet."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._numbers.tolist()  # type: ignore[no-any-return]
