"""What it costs to draw a batch from several loaders: the pick, and everything with samples and tokens
counted.

A fixed pattern of lists is the cheapest that a loop written by hand could do; the difference is what a
mixture costs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hookline import Mixture
from hookline.data.loaders import Loader
from hookline.data.mixing import MixtureCursor
from hookline.data.mixture import MixedLoader

BATCHES, ROUNDS = 100_000, 9
MIXTURES = {
    "round robin": Mixture(epoch_length=BATCHES, window=1000),
    "weighted 7 : 2 : 1": Mixture(
        "weighted", {"web": 7, "code": 2, "math": 1}, epoch_length=BATCHES, window=1000
    ),
    "weighted, no common divisor": Mixture(
        "weighted", {"web": 0.61, "code": 0.3, "math": 0.1}, epoch_length=99_991
    ),
    "random": Mixture("random", epoch_length=BATCHES, window=1000),
    "alternating": Mixture(
        "alternating", pattern=["web", "web", "code", "math"], epoch_length=BATCHES, window=1000
    ),
}
BATCH = (torch.zeros(8, 32), torch.zeros(8))
SOURCES = {"web": [BATCH] * 1000, "code": [BATCH] * 500, "math": [BATCH] * 100}


def by_hand() -> Iterator[Any]:
    """Yield from three endless lists in turn."""
    streams = [itertools.cycle(source) for source in SOURCES.values()]
    for index in range(BATCHES):
        yield next(streams[index % 3])


def drawn(mixture: Mixture) -> Iterator[Any]:
    """Return batches as a run gets them."""
    return MixedLoader([Loader(name, source, len(source)) for name, source in SOURCES.items()], mixture).open(
        0
    )


def microseconds(make: Callable[[], Iterator[Any]]) -> float:
    """Return microseconds per batch, the best of some rounds, because other work of the machine only makes it
    slower.
    """
    best = float("inf")
    for _ in range(ROUNDS):
        batches = make()
        began = time.thread_time_ns()
        for _batch in batches:
            pass
        best = min(best, (time.thread_time_ns() - began) / BATCHES / 1e3)
    return best


def main() -> None:
    """Print a table."""
    bare = microseconds(by_hand)
    print(f"three lists in turn, by hand: {bare:.2f} µs a batch\n")
    print(f"{'':30}{'pick, µs (aim: 1)':>20}{'all of it more than by hand, µs':>34}")
    lengths = {name: len(source) for name, source in SOURCES.items()}
    for name, mixture in MIXTURES.items():
        pick = microseconds(lambda mixture=mixture: MixtureCursor(mixture, lengths))  # type: ignore[misc]
        whole = microseconds(lambda mixture=mixture: drawn(mixture))  # type: ignore[misc]
        print(f"{name:30}{pick:20.2f}{whole - bare:34.2f}")


if __name__ == "__main__":
    main()
