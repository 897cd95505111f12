"""torchrun, whose ranks begin with torch imported: `python -m ranks.launcher ADDRESSES` and what torchrun is given.

Each rank has a server of its own, so that two ranks hash strings differently, as they do when torchrun starts them.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping

import preloaded
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

ADDRESSES = sys.argv.pop(1).split(",")


class Rank(preloaded.Popen):
    """What torchrun starts."""

    def address(self, environment: Mapping[str, str] | None) -> str:
        assert environment is not None
        return ADDRESSES[int(environment["LOCAL_RANK"])]


if __name__ == "__main__":
    subprocess_handler.Popen = Rank  # type: ignore[misc]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
