"""What the processes of a run say to each other: plain data, on a process group of its own,
never by pickle.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from hookline.util.errors import HooklineError

T = TypeVar("T")
INT = torch.int64
LONGEST = 1000
"""Characters of an error's message that the other ranks are told."""
PAUSE, LONGEST_PAUSE = 0.005, 0.2
"""Seconds between two looks at who has come: ever more of them."""
STARTS = "starts"
"""The store at which all runs of a job begin."""


class Ranks:
    """This process among those of the run. One process has nobody to talk to: every answer is its own.

    Everything here goes over the control group, so that it never interleaves with what the model's own groups
    send. All ranks must call the same things in the same order.
    """

    preempted: ClassVar[str] = ""
    """The signal that has ended a run in this process; the interpreter remembers no such end."""

    def __init__(
        self,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        timeout: float = 1800,
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.group = group
        """The control group, on gloo whatever the model uses."""
        self.timeout = timeout
        """Seconds that ranks wait for each other."""
        self._beside: Ranks | None = None

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.group is None

    @property
    def exchanges(self) -> int:
        """How many things this rank has begun on the control group; as many as every other, or they talk at
        cross purposes.
        """
        return int(self.group._get_sequence_number_for_group())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks, on every rank. Waits for all."""
        if self.group is None:
            return [value]
        try:
            return self._gather(value)
        except RuntimeError as error:
            explain_loss(error, self.world_size)
            raise

    def _gather(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=INT) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(mine)], dtype=INT), group=self.group)
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, padded, group=self.group)
        return [json.loads(bytes(text[: int(n)].tolist())) for text, n in zip(texts, lengths, strict=True)]

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, as many from each. Waits for all."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        if self.group is None:
            return [mine.tolist()]
        everybody = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everybody, mine, group=self.group)
        return [each.tolist() for each in everybody]

    def from_zero(self, value: Any) -> Any:
        """Rank zero's value, on every rank. Waits for all."""
        return self.gather(value if self.rank == 0 else None)[0]

    def beside(self) -> Ranks:
        """The same ranks on a group of its own, for a thread that talks while the others do. All of them must
        make it.
        """
        if self.group is None:
            return self
        if self._beside is None:
            group = gloo_group(self.timeout, dist.get_process_group_ranks(self.group))
            self._beside = Ranks(self.rank, self.local_rank, self.world_size, group, self.timeout)
        return self._beside

    def store(self, name: str) -> Any:
        """A store where ranks leave each other notes, over a connection of its own: one for each thread that
        uses it.
        """
        c10d: Any = dist.distributed_c10d
        return c10d.PrefixStore(f"hookline/{name}", c10d._get_default_store().clone())

    def tell_end(self, error: BaseException | None) -> None:
        """This process ends, in good order or by an error that nobody has caught: whoever waits for it in
        vain can say so.
        """
        with contextlib.suppress(RuntimeError, dist.DistError):
            how = f"after {Ranks.preempted}" if Ranks.preempted else "in good order"
            if error is not None:
                how = f"by {type(error).__name__}: {str(error)[:LONGEST]}"
            store = _message_store("ended")
            store.set(str(self.rank), how)
            store.set("somebody", "")

    def remember_failure(self, text: str) -> None:
        """A run has failed on this rank: should the next one find that the ranks are out of step, it can say
        why.
        """
        with contextlib.suppress(RuntimeError, dist.DistError):
            _message_store(STARTS).set("failure", f"rank {self.rank} ({text.rstrip('.')})")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def decide(self, choose: Callable[[], T]) -> T:
        """What rank zero chooses, on every rank. If it cannot, everybody learns why. Waits for all."""
        if self.group is None:
            return choose()
        chosen: Any = None
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                chosen = choose()
            except BaseException as error:
                failure = error
        refused = f"{type(failure).__name__}: {failure}" if failure is not None else None
        chosen, refused = self.from_zero([chosen, refused])
        if failure is not None:
            raise failure
        if refused is not None:
            raise HooklineError(f"Rank 0 could not begin: {refused}")
        return chosen  # type: ignore[no-any-return]

    def largest(self, values: Sequence[int]) -> Answer:
        """Begin to find each number's largest over all ranks; nobody waits until the answer is read."""
        return self._begin(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[int]) -> Answer:
        """Begin to add up each number over all ranks; nobody waits until the answer is read."""
        return self._begin(values, dist.ReduceOp.SUM)

    def add_up(self, numbers: Tensor) -> Answer:
        """Begin to add up the tensor over all ranks, in place and on its device; nobody waits until the
        answer is read.
        """
        work = None if self.group is None else dist.all_reduce(numbers, group=self.group, async_op=True)
        return Answer(numbers, work)

    def rounds(self, count: int) -> Rounds:
        """For what is asked after every batch: so many numbers, of each the largest over all ranks."""
        return Rounds(self.group, count)

    def _begin(self, values: Sequence[int], operation: Any) -> Answer:
        numbers = torch.tensor(values, dtype=INT)
        work = (
            None
            if self.group is None
            else dist.all_reduce(numbers, operation, group=self.group, async_op=True)
        )
        return Answer(numbers, work)


def explain_loss(error: RuntimeError, world_size: int) -> None:
    """If others no longer answer: say who has ended, and how."""
    if "gloo" in str(error):
        error.add_note(
            who_has_ended(world_size) or "Processes of this job have ended: which, their own logs say."
        )


def who_has_ended(world_size: int) -> str:
    """Which processes of the job are gone, and how they have ended, in a sentence; nothing if all that is
    known are there.
    """
    ended = []
    with contextlib.suppress(RuntimeError, dist.DistError):
        store = _message_store("ended")
        gone = (
            [rank for rank in range(world_size) if store.check([str(rank)])]
            if store.check(["somebody"])
            else []
        )
        ended = [f"rank {rank} {store.get(str(rank)).decode()}" for rank in gone]
    hint = (
        " What this rank was doing takes all ranks: did only some of them call it?"
        if "in good order" in str(ended)
        else ""
    )
    return f"Processes of this job have ended: {'; '.join(ended)}.{hint}" if ended else ""


def assemble(store: Any, where: str, world_size: int, look: Callable[[], None]) -> None:
    """Wait until all ranks have come here, however long one takes. `look`: called meanwhile,
    and may raise.
    """
    store.add(where, 1)
    pause = PAUSE
    while store.add(where, 0) < world_size:
        look()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def gloo_group(timeout: float, members: list[int] | None = None) -> Any:
    """A group for plain data, of all ranks or these. All of them must make it."""
    return dist.new_group(members, backend="gloo", timeout=datetime.timedelta(seconds=timeout))


def listed(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2`."""
    few = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"


def _message_store(name: str) -> Any:
    """As `Ranks.store`, over the connection there is: to make another one to what is gone takes long."""
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(f"hookline/{name}", c10d._get_default_store())


class Answer:
    """An answer that is on its way."""

    __slots__ = ("_numbers", "_work")

    def __init__(self, numbers: Tensor, work: Any) -> None:
        self._numbers = numbers
        self._work = work

    @property
    def has_come(self) -> bool:
        """Whether reading it would not wait."""
        return self._work is None or self._work.is_completed()

    def read(self) -> list[Any]:
        """The answer; waits for it if it has not come yet."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                explain_loss(error, dist.get_world_size())
                raise
            self._work = None
        return self._numbers.tolist()


class Rounds:
    """The same question after every batch: the next one is asked before the answer to the last one is read.

    It is in the way of every batch. So nothing is made anew for it, and the group is called without torch's
    wrapper, which takes longer than beginning the exchange.
    """

    __slots__ = ("_next", "_other")

    def __init__(self, group: Any, count: int) -> None:
        self._next, self._other = Round(group, count), Round(group, count)

    def ask(self, values: Sequence[int]) -> Round:
        """Begin to find each number's largest; the answer must be read before the next but
        one is asked for.
        """
        asked, self._next, self._other = self._next, self._other, self._next
        asked.begin(values)
        return asked


class Round:
    """A question whose numbers, and later their answers, are always in the same place."""

    __slots__ = ("_group", "_numbers", "_options", "_tensors", "_work")

    def __init__(self, group: Any, count: int) -> None:
        c10d: Any = dist.distributed_c10d
        self._group = group
        self._options = c10d.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX
        self._numbers = array("q", bytes(8 * count))
        self._tensors = [torch.frombuffer(self._numbers, dtype=INT)]  # shares the memory
        self._work: Any = None

    def begin(self, values: Sequence[int]) -> None:
        """Say this rank's numbers."""
        self._numbers[:] = array("q", values)
        self._work = self._group.allreduce(self._tensors, self._options)

    def read(self) -> list[int]:
        """The answer; waits for it if it has not come yet."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._numbers.tolist()
