"""What Hookline adds to a step of two ranks over a loop written by hand, and what the ranks' own talk takes.
See README.md.

Started by itself it launches two ranks with torchrun, on the CPU over gloo, one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from work import GPT, Batch, Block, optimizer, text

OUT = Path(__file__).resolve().parent.parent / "bench-out"
UNTIMED, TIMED = 5, 25


class Large(GPT):
    """A decoder whose step is long enough for hundreds of ranks to be worth it: 5 M weights."""

    def __init__(self) -> None:
        super().__init__(width=256)
        self.blocks = nn.Sequential(*(Block(256, 4) for _ in range(6)), nn.LayerNorm(256), nn.Linear(256, 65))


class Timed:
    """Batches of this rank; notes when the timed ones began and ended."""

    shards_itself = True

    def __init__(self, batches: list[Batch], talk: Talk) -> None:
        self.batches, self.talk = batches, talk
        self.seconds = 0.0
        """For a step."""
        self.spent = self.waited = 0.0
        """Of these: on what ranks say to each other, and waiting for it."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        began = spent = waited = 0.0
        for index, batch in enumerate(self.batches):
            if index == UNTIMED:
                began, spent, waited = time.perf_counter(), self.talk.spent, self.talk.waited
            if index == UNTIMED + TIMED:  # asked for when the timed ones are done
                self.seconds = (time.perf_counter() - began) / TIMED
                self.spent, self.waited = (
                    (self.talk.spent - spent) / TIMED,
                    (self.talk.waited - waited) / TIMED,
                )
            yield batch


class Step(nn.Module):
    """A forward that is the whole training step, for wrappers that are put on by hand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model.training_step(batch, 0)
        return loss


def by_hand(kind: str, model: nn.Module, data: Timed) -> None:
    """Train with the loop that people write."""
    wrapped: Any = Step(model)
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(wrapped)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.modules():
            if isinstance(block, Block):
                fully_shard(block)
        fully_shard(wrapped)
    updates = optimizer(wrapped.parameters())
    for batch in data:
        loss = wrapped(batch)
        updates.zero_grad()
        loss.backward()
        updates.step()


def with_hookline(kind: str, model: nn.Module, data: Timed, hooks: tuple[Any, ...] = ()) -> Any:
    """Train the same with Hookline."""
    from hookline import DDP, FSDP, Trainer

    strategy = DDP(device="cpu") if kind == "ddp" else FSDP(device="cpu", wrap="Block")
    trainer = Trainer(
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        hooks=[each() for each in hooks],
    )
    trainer.fit(model, data, step=lambda net, batch: net.training_step(batch, 0), optimizer=optimizer)
    return trainer


def watched() -> tuple[Any, ...]:
    """Return the hooks of a long run: they measure, log, and look for slow ranks."""
    from hookline.hooks.early_stopping import EarlyStopping
    from hookline.hooks.gradient_monitor import GradientMonitor
    from hookline.hooks.lr_monitor import LRMonitor
    from hookline.hooks.throughput import Throughput

    return (
        LRMonitor,
        Throughput,
        lambda: GradientMonitor(log_frequency=20),
        lambda: EarlyStopping("train/loss", patience=9, check_finite=False),
    )


class Talk:
    """The time that this rank spends on what ranks say to each other.

    Reading an answer mostly waits for a rank that is not so far yet, as the gradients would have to a moment
    later. So it is counted apart, by the CPU time it takes, and on the wall.
    """

    def __init__(self) -> None:
        from hookline.distributed import comm as ranks

        self.spent = self.waited = 0.0
        for owner, name in (
            (ranks.Ranks, "_begin"),
            (ranks.Ranks, "gather"),
            (ranks.Ranks, "add_up"),
            (ranks.Answer, "read"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            wall, own = time.perf_counter(), time.thread_time()
            try:
                return call(*args)
            finally:
                used = time.thread_time() - own
                self.spent += used
                self.waited += time.perf_counter() - wall - used

        return timed


def measure(name: str, make: Callable[[], nn.Module], kind: str, rounds: int, talk: Talk) -> dict[str, Any]:
    """Run the loop by hand and Hookline in turn; return the time of a step, and the shares of hooks and of
    communication.
    """
    torch.manual_seed(0)
    batches = [text() for _ in range(UNTIMED + TIMED + 1)]
    hand, ours, ratios, talks, waits, hooked, spent = [], [], [], [], [], [], []
    for turn in range(rounds + 1):
        bare, full, heard = (Timed(batches, talk) for _ in range(3))
        by_hand(kind, make(), bare)
        with_hookline(kind, make(), full)
        trainer = with_hookline(kind, make(), heard, watched())
        if turn:  # the first one warms up
            hand.append(bare.seconds)
            ours.append(full.seconds)
            ratios.append(full.seconds / bare.seconds)
            hooked.append(heard.seconds)
            talks.append(full.spent / full.seconds)
            waits.append(full.waited / full.seconds)
            spent.append(sum(each.seconds for each in trainer.hooks.cost()) / (heard.seconds * len(batches)))
    middle = statistics.median
    return {
        "model": name,
        "strategy": kind,
        "by hand, ms": middle(hand) * 1e3,
        "hookline, ms": middle(ours) * 1e3,
        "ratio": middle(ratios),
        "with hooks, ms": middle(hooked) * 1e3,
        "hooks, %": middle(spent) * 100,
        "talk, %": middle(talks) * 100,
        "waiting in it, %": middle(waits) * 100,
    }


def pieces() -> dict[str, float]:
    """Return the microseconds of single exchanges: the inputs of the page on scale."""
    from torch.distributed.fsdp import fully_shard

    from hookline import DDP
    from hookline.distributed.sharded_norms import norm_of

    strategy = DDP(device="cpu")
    strategy.connect()
    ranks, row = strategy.ranks, {f"metric_{n}": 0.5 for n in range(30)}
    model: Any = Large()
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block)
    fully_shard(model)
    grads = [each.detach() for each in model.parameters()]

    def gathered() -> None:
        for gradient in grads:
            gradient.full_tensor().norm()

    rounds, nothing = ranks.rounds(6), (0, 0, 0, 0, 0, 0)
    asked = [rounds.ask(nothing)]

    def in_turn() -> None:
        asked.append(rounds.ask(nothing))
        asked.pop(0).read()

    in_turn_us = timed(in_turn, 200)
    asked.pop().read()
    return {
        "an agreement, begun, and the one before it read": in_turn_us,
        "an agreement, read at once": timed(lambda: rounds.ask(nothing).read(), 200),
        "a row of 30 metrics, from all": timed(lambda: ranks.gather(row), 50),
        "a barrier": timed(ranks.barrier, 200),
        f"the norm of {len(grads)} sharded tensors": timed(lambda: norm_of(grads), 20),
        f"the same by gathering {len(grads)} tensors": timed(gathered, 5),
    }


def timed(call: Callable[[], Any], times: int) -> float:
    """Return the microseconds of one call, the median of some rounds."""
    found = []
    for _ in range(7):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - began) / times * 1e6)
    return statistics.median(found)


def show(rows: list[dict[str, Any]], parts: dict[str, float]) -> str:
    """Return two tables in Markdown."""
    names = list(rows[0])
    texts = [[f"{each:.2f}" if isinstance(each, float) else each for each in row.values()] for row in rows]
    lines = [f"| {' | '.join(each)} |" for each in (names, ["---"] * len(names), *texts)]
    lines += ["", "| one exchange of two ranks | µs |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value:.0f} |" for name, value in parts.items())])


def rank_main(rounds: int) -> None:
    """Run one of the ranks."""
    torch.set_num_threads(1)
    talk = Talk()
    parts = pieces()
    models: dict[str, Callable[[], nn.Module]] = {"GPT, 110 k weights": GPT, "GPT, 5 M weights": Large}
    rows = [
        measure(name, make, kind, rounds, talk) for name, make in models.items() for kind in ("ddp", "fsdp")
    ]
    if dist.get_rank() == 0:
        OUT.mkdir(exist_ok=True)
        table = show(rows, parts)
        (OUT / "distributed.md").write_text(table + "\n")
        (OUT / "distributed.json").write_text(json.dumps({"rows": rows, "parts": parts}, indent=1))
        print(table)


def main() -> None:
    """Launch the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds: a first impression")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    if "RANK" in os.environ:
        rank_main(rounds)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch = [*torchrun, __file__, "--rounds", str(rounds)]
    sys.exit(subprocess.run(launch, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)


if __name__ == "__main__":
    main()
