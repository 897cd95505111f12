"""Communication between the ranks of a run: plain data over a separate process group, without pickle."""

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

from hookline.util import errors
from hookline.util.errors import HooklineError, PeerError

T = TypeVar("T")
INT = torch.int64
MAX_MESSAGE = 1000
"""Characters of an error message that are sent to the other ranks."""
PAUSE, LONGEST_PAUSE = 0.005, 0.2
"""Seconds between two polls of the store: the first pause and the longest one."""
STARTS = "starts"
"""The name of the store that all runs of a job use when they start."""
NORMALLY = "normally, without an error"
"""How a process ended that had no error and got no signal."""
ANY_ENDED = "any"
"""The key that exists once any rank has ended, so that a check asks the store only once."""


class Ranks:
    """The ranks of a run, as this rank sees them. With one process every method returns the local value.

    All methods use the control group, so their traffic never interleaves with the model's own collectives.
    All ranks must call the same methods in the same order.
    """

    preempted: ClassVar[str] = ""
    """The signal that ended a run in this process, because the interpreter does not record it."""

    def __init__(
        self,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        timeout: float = 1800,
        data_ranks: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.group = group
        """The control group: always gloo, whatever backend the model uses."""
        self.timeout = timeout
        """Seconds after which waiting for another rank is an error."""
        self.data_ranks = tuple(data_ranks) or tuple(range(world_size))
        """The data-parallel rank of each rank. Ranks of one tensor-parallel group have the same one: they
        read the same batches, and what they count or log is counted once.
        """
        self.data_group: Any = None
        """The process group of this rank and the ranks with other batches. None: all ranks."""
        self._beside: Ranks | None = None

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.group is None

    @property
    def data_rank(self) -> int:
        """The data-parallel rank of this rank: its place among the ranks that read different batches."""
        return self.data_ranks[self.rank]

    @property
    def data_size(self) -> int:
        """The number of ranks that read different batches."""
        return max(self.data_ranks) + 1

    @property
    def readers(self) -> list[int]:
        """The first rank of each data-parallel rank: their values together are those of all data, once."""
        return [self.data_ranks.index(each) for each in range(self.data_size)]

    @property
    def is_reader(self) -> bool:
        """Whether this rank is the first one with its batches."""
        return self.data_ranks.index(self.data_rank) == self.rank

    @property
    def exchanges(self) -> int:
        """The number of collectives that this rank has started on the control group.

        It must be equal on all ranks; otherwise their collectives do not match.
        """
        return int(self.group._get_sequence_number_for_group())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Waits for all ranks."""
        if self.group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=INT) for _ in range(self.world_size)]
        try:
            dist.all_gather(lengths, torch.tensor([len(mine)], dtype=INT), group=self.group)
            longest = int(max(lengths))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = mine
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
            dist.all_gather(texts, padded, group=self.group)
        except RuntimeError as error:
            _explain_lost_connection(error, self.world_size)
            raise
        return [json.loads(bytes(text[: int(n)].tolist())) for text, n in zip(texts, lengths, strict=True)]

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, in rank order; every rank passes equally many. Waits for all."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        if self.group is None:
            return [mine.tolist()]
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(gathered, mine, group=self.group)
        except RuntimeError as error:
            _explain_lost_connection(error, self.world_size)
            raise
        return [each.tolist() for each in gathered]

    def from_zero(self, value: Any) -> Any:
        """Return rank zero's value on every rank. Waits for all ranks."""
        return self.gather(value if self.rank == 0 else None)[0]

    def beside(self) -> Ranks:
        """Return the same ranks on a second group, for another thread. All ranks must call this."""
        if self.group is None:
            return self
        if self._beside is None:
            group = gloo_group(self.timeout, dist.get_process_group_ranks(self.group))
            self._beside = Ranks(
                self.rank, self.local_rank, self.world_size, group, self.timeout, self.data_ranks
            )
        return self._beside

    def store(self, name: str) -> Any:
        """Return a store for messages between ranks, over a new connection: each thread needs its own."""
        c10d: Any = dist.distributed_c10d
        return c10d.PrefixStore(f"hookline/{name}", c10d._get_default_store().clone())

    def is_first(self, name: str) -> bool:
        """Return whether no rank has called this with the name before. Does not wait for other ranks."""
        if self.group is None:
            return True
        with contextlib.suppress(RuntimeError, dist.DistError):  # rank zero is gone
            return bool(_message_store("first").add(name, 1) == 1)
        return True

    def report_end(self, error: BaseException | None) -> None:
        """Record in the store how this process ends, so that ranks that wait for it can report it.

        error: the uncaught exception, if there is one.
        """
        with contextlib.suppress(RuntimeError, dist.DistError):
            how = f"after {Ranks.preempted}" if Ranks.preempted else NORMALLY
            if error is not None:
                how = f"by {type(error).__name__}: {str(error)[:MAX_MESSAGE]}"
            store = _message_store("ended")
            store.set(str(self.rank), how)
            store.set(ANY_ENDED, "")

    def record_failure(self, text: str) -> None:
        """Record that a run failed on this rank, so that the next run can explain why ranks differ."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            _message_store(STARTS).set("failure", f"rank {self.rank} ({text.rstrip('.')})")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def decide(self, choose: Callable[[], T]) -> T:
        """Return what `choose` returns on rank zero, on every rank. If it raises, all ranks raise."""
        if self.group is None:
            return choose()
        chosen: Any = None
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                chosen = choose()
            except BaseException as error:
                failure = error
        refused = None if failure is None else [type(failure).__name__, str(failure)]
        chosen, refused = self.from_zero([chosen, refused])
        if failure is not None:
            raise failure
        if refused is not None:
            raise _as_on_zero(*refused)
        return chosen  # type: ignore[no-any-return]

    def largest(self, values: Sequence[int]) -> Answer:
        """Start an all-reduce of each number's maximum. Reading the answer waits for it."""
        return self._all_reduce(torch.tensor(values, dtype=INT), dist.ReduceOp.MAX)

    def total(self, values: Sequence[int]) -> Answer:
        """Start an all-reduce of each number's sum. Reading the answer waits for it."""
        return self._all_reduce(torch.tensor(values, dtype=INT), dist.ReduceOp.SUM)

    def everywhere(self, flag: bool) -> bool:
        """Return whether the flag is set on every rank. Waits for all ranks."""
        return flag if self.group is None else self.total([not flag]).read() == [0]

    def add_up(self, numbers: Tensor) -> Answer:
        """Start a sum of the tensor over all ranks, in place. Reading the answer waits for it."""
        return self._all_reduce(numbers, dist.ReduceOp.SUM)

    def rounds(self, count: int) -> Rounds:
        """Return a reusable all-reduce of the maximum of `count` numbers, for use after every batch."""
        return Rounds(self.group, count)

    def _all_reduce(self, numbers: Tensor, operation: Any) -> Answer:
        work = (
            None
            if self.group is None
            else dist.all_reduce(numbers, operation, group=self.group, async_op=True)
        )
        return Answer(numbers, work)


def _as_on_zero(kind: str, text: str) -> HooklineError:
    """Return an error of rank zero for another rank: the same one if it is Hookline's, else a `PeerError`."""
    own = getattr(errors, kind, None)
    if isinstance(own, type) and issubclass(own, HooklineError):
        return own(text)
    return PeerError(f"Rank 0 could not begin: {kind}: {text}")


def _explain_lost_connection(error: RuntimeError, world_size: int) -> None:
    """Add a note to a gloo error: which ranks have ended, and how."""
    if "gloo" in str(error):
        error.add_note(
            describe_ended_ranks(world_size)
            or "Processes of this job have ended; the logs of the other ranks show which."
        )


def describe_ended_ranks(world_size: int) -> str:
    """Return a sentence that lists the ranks that have ended, and how; empty if none is known."""
    ended = []
    with contextlib.suppress(RuntimeError, dist.DistError):
        store = _message_store("ended")
        gone = (
            [rank for rank in range(world_size) if store.check([str(rank)])]
            if store.check([ANY_ENDED])
            else []
        )
        ended = [f"rank {rank} {store.get(str(rank)).decode()}" for rank in gone]
    hint = (
        " This rank was in a call that all ranks must make: did only some ranks call it?"
        if NORMALLY in str(ended)
        else ""
    )
    return f"Processes of this job have ended: {'; '.join(ended)}.{hint}" if ended else ""


def wait_for_all_ranks(store: Any, where: str, world_size: int, look: Callable[[], None]) -> None:
    """Wait without a timeout until all ranks have arrived. Meanwhile call `look`, which may raise."""
    store.add(where, 1)
    pause = PAUSE
    while store.add(where, 0) < world_size:
        look()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def gloo_group(timeout: float, members: list[int] | None = None) -> Any:
    """Make a gloo group for plain data, of all ranks or of `members`. All ranks must call this."""
    return dist.new_group(members, backend="gloo", timeout=datetime.timedelta(seconds=timeout))


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text: `rank 3`, `ranks 0, 2`."""
    few = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"


def _message_store(name: str) -> Any:
    """Return a store as `Ranks.store` does, over the existing connection.

    A new connection to a process that is gone would take long.
    """
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(f"hookline/{name}", c10d._get_default_store())


class Answer:
    """The result of an asynchronous all-reduce."""

    __slots__ = ("_numbers", "_work")

    def __init__(self, numbers: Tensor, work: Any) -> None:
        self._numbers = numbers
        self._work = work

    @property
    def is_ready(self) -> bool:
        """Whether the result is complete, so that reading it does not wait."""
        return self._work is None or self._work.is_completed()

    def wait(self, patience: float, report: Callable[[float], None]) -> None:
        """Wait for the result, and call `report(seconds waited)` each time the patience ends.

        The watchdog knows a wait for other ranks by this function (`reliability/stacks.py`).
        """
        began, due = time.monotonic(), patience
        while not self.is_ready:
            if (waited := time.monotonic() - began) >= due:
                due += patience
                report(waited)
            time.sleep(PAUSE)

    def read(self) -> list[Any]:
        """Return the numbers; wait for them if necessary."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                _explain_lost_connection(error, dist.get_world_size())
                raise
            self._work = None
        return self._numbers.tolist()


class Rounds:
    """A repeated all-reduce of maxima; the next one may start before the last one is read.

    It runs after every batch. So it allocates nothing, and it calls the group without torch's wrapper, which
    takes longer than starting the collective.
    """

    __slots__ = ("_next", "_other")

    def __init__(self, group: Any, count: int) -> None:
        self._next, self._other = Round(group, count), Round(group, count)

    def ask(self, values: Sequence[int]) -> Round:
        """Start an all-reduce of each number's maximum. Read it before the next call but one."""
        asked, self._next, self._other = self._next, self._other, self._next
        asked.begin(values)
        return asked


class Round:
    """One all-reduce that keeps its buffer: the numbers go in and the result comes out of the same memory."""

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
        """Start the all-reduce with this rank's numbers."""
        self._numbers[:] = array("q", values)
        self._work = self._group.allreduce(self._tensors, self._options)

    def read(self) -> list[int]:
        """Return the maxima; wait for them if necessary."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._numbers.tolist()
