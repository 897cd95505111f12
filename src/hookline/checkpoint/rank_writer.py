"""A checkpoint that all ranks write together: each its own files at the same time, then rank zero gives it
its name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint import remote
from hookline.checkpoint.format import Packed
from hookline.checkpoint.writer import WRITE_TIMEOUT, commit, flush, open_temporary, telling_why, write_parts
from hookline.distributed.comm import Ranks
from hookline.util.errors import CheckpointError
from hookline.util.text import redact
from hookline.util.urls import as_url


def write_on_all_ranks(
    packed: Packed,
    path: Path | str,
    about: Mapping[str, Any],
    ranks: Ranks,
    staging: Callable[[], Path] | None,
) -> None:
    """Write a checkpoint with all ranks. Whatever fails on one of them is an error on all, and leaves nothing
    under its name.

    staging: the folder, shared by the ranks, where files are put together before they are copied to a URL.
    """
    url = as_url(path)
    if url is None:
        _write_folder(packed, Path(path), about, ranks)
        return
    with contextlib.ExitStack() as until_done:
        # rank zero's name for the folder counts; it removes it too
        folder = Path(
            _tell(ranks, redact(url), lambda: str(until_done.enter_context(remote.staged(staging))))
        )
        _write_folder(packed, folder / "checkpoint", about, ranks, redact(url))
        _tell(ranks, redact(url), lambda: remote.copy_to_url(folder / "checkpoint", url))


def _write_folder(
    packed: Packed, path: Path, about: Mapping[str, Any], ranks: Ranks, shown: str = ""
) -> None:
    with contextlib.ExitStack() as until_done:
        place: Any = None

        def begin() -> str:
            nonlocal place
            with telling_why(packed, path):
                aside, place = until_done.enter_context(open_temporary(path))
            return str(aside)

        aside = Path(_tell(ranks, shown or path, begin))
        files = _all_written(ranks, packed, aside, shown or path)

        def end() -> None:
            with telling_why(packed, path):
                commit(aside, place, packed, about, files)

        _tell(ranks, shown or path, end)


def _all_written(ranks: Ranks, packed: Packed, aside: Path, path: Path | str) -> dict[str, Any]:
    """This rank's files are on the disk, and everyone else's."""
    problem, files = "", {}
    try:
        _wait_for(aside)
        with telling_why(packed, Path(path)):
            files = write_parts(aside, packed, ranks.rank)
            flush(aside)
    except Exception as error:  # whatever it is, the others must not wait
        problem = _said(error)
    part = packed.part
    told = ranks.gather(
        {"problem": problem, "files": files, "here": part.numbers_here, "wanted": part.numbers_wanted}
    )
    _refuse(path, {rank: each["problem"] for rank, each in enumerate(told) if each["problem"]})
    here, wanted = sum(each["here"] for each in told), told[0]["wanted"]
    if here != wanted:
        raise CheckpointError(
            f"The checkpoint {path} was not written: its tensors that are spread over ranks have {wanted} "
            f"numbers, but the ranks' pieces {here}. Have all ranks the same module and mesh?"
        )
    return {name: facts for each in told for name, facts in each["files"].items()}


def _wait_for(aside: Path) -> None:
    until = time.monotonic() + WRITE_TIMEOUT
    while not aside.is_dir():
        if time.monotonic() > until:
            raise CheckpointError(
                f"this rank does not see {aside.parent} as rank zero does: all ranks write into one "
                "directory, so it must be on a disk that they share."
            )
        time.sleep(0.05)


def _tell(ranks: Ranks, path: Path | str, act: Callable[[], Any]) -> Any:
    """Rank zero does something, and everyone hears what came of it."""
    problem, result = "", None
    if ranks.rank == 0:
        try:
            result = act()
        except Exception as error:
            problem = _said(error)
    told = ranks.from_zero([problem, result])
    _refuse(path, {0: told[0]} if told[0] else {})
    return told[1]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, CheckpointError) else str(error)


def _refuse(path: Path | str, problems: dict[int, str]) -> None:
    if problems:
        said = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        raise CheckpointError(
            said if str(path) in said else f"The checkpoint {path} could not be written: {said}"
        )
