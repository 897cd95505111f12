"""torchrun, whose ranks begin with torch imported: `python -m ranks.launcher ADDRESSES` and what torchrun is given.

Neighbouring ranks have different servers, so that they hash strings differently, as they do when torchrun starts them.
"""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from collections.abc import Mapping
from typing import NamedTuple

import preloaded
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

ADDRESSES = sys.argv.pop(1).split(",")


class Rank(preloaded.Popen):
    """What torchrun starts."""

    def address(self, environment: Mapping[str, str] | None) -> str:
        assert environment is not None
        return ADDRESSES[int(environment["LOCAL_RANK"])]


class Caller(NamedTuple):
    """What torchrun reads of a frame, for its log of events."""

    filename: str
    function: str


def callers() -> list[Caller]:
    """Stand in for `inspect.stack`, which searches all modules that are imported for each frame: 1 s for every launch."""
    frames = traceback.walk_stack(sys._getframe(1))
    return [Caller(each.f_code.co_filename, each.f_code.co_name) for each, _ in frames]


if __name__ == "__main__":
    inspect.stack = callers  # type: ignore[assignment]
    subprocess_handler.Popen = Rank  # type: ignore[misc]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
