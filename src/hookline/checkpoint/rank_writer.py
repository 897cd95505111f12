"""Write a checkpoint with all ranks: each rank writes its files, then rank zero renames the directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint import remote
from hookline.checkpoint.format import Packed
from hookline.checkpoint.writer import (
    WRITE_TIMEOUT,
    commit,
    explain_write_errors,
    flush,
    open_temporary,
    write_parts,
)
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
    """Write a checkpoint with all ranks. A failure on one rank raises on all and leaves no checkpoint.

    staging: returns the folder, shared by the ranks, for the files that are copied to a URL.
    """
    url = as_url(path)
    if url is None:
        _write_folder(packed, Path(path), about, ranks)
        return
    with contextlib.ExitStack() as until_done:
        # rank zero creates the folder and removes it
        folder = Path(
            _run_on_rank_zero(
                ranks, redact(url), lambda: str(until_done.enter_context(remote.staging_folder(staging)))
            )
        )
        _write_folder(packed, folder / "checkpoint", about, ranks, redact(url))
        _run_on_rank_zero(ranks, redact(url), lambda: remote.copy_to_url(folder / "checkpoint", url))


def _write_folder(
    packed: Packed, path: Path, about: Mapping[str, Any], ranks: Ranks, shown: str = ""
) -> None:
    with contextlib.ExitStack() as until_done:
        target: Any = None

        def open_directory() -> str:
            nonlocal target
            with explain_write_errors(packed, path):
                temporary, target = until_done.enter_context(open_temporary(path))
            return str(temporary)

        temporary = Path(_run_on_rank_zero(ranks, shown or path, open_directory))
        files = _write_and_gather(ranks, packed, temporary, shown or path)

        def rename_directory() -> None:
            with explain_write_errors(packed, path):
                commit(temporary, target, packed, about, files)

        _run_on_rank_zero(ranks, shown or path, rename_directory)


def _write_and_gather(ranks: Ranks, packed: Packed, temporary: Path, path: Path | str) -> dict[str, Any]:
    """Write this rank's files, wait for the other ranks, and return the sizes and checksums of all files."""
    problem, files = "", {}
    try:
        _wait_for_directory(temporary)
        with explain_write_errors(packed, Path(path)):
            files = write_parts(temporary, packed, ranks.rank)
            flush(temporary)
    except Exception as error:  # the other ranks wait in `gather`, so every error must reach it
        problem = _describe_error(error)
    part = packed.part
    reports = ranks.gather(
        {"problem": problem, "files": files, "here": part.elements_here, "wanted": part.elements_wanted}
    )
    _raise_problems(path, {rank: each["problem"] for rank, each in enumerate(reports) if each["problem"]})
    here, wanted = sum(each["here"] for each in reports), reports[0]["wanted"]
    if here != wanted:
        raise CheckpointError(
            f"The checkpoint {path} was not written: its sharded tensors have {wanted} elements, but the "
            f"shards of all ranks have {here}. Check that all ranks have the same module and device mesh."
        )
    return {name: facts for each in reports for name, facts in each["files"].items()}


def _wait_for_directory(temporary: Path) -> None:
    until = time.monotonic() + WRITE_TIMEOUT
    while not temporary.is_dir():
        if time.monotonic() > until:
            raise CheckpointError(
                f"{temporary.parent} on this rank is not the directory that rank zero writes to: all ranks "
                "write into one directory, so it must be on a shared disk."
            )
        time.sleep(0.05)


def _run_on_rank_zero(ranks: Ranks, path: Path | str, act: Callable[[], Any]) -> Any:
    """Call `act` on rank zero and return its result, or raise its error, on all ranks."""
    problem, result = "", None
    if ranks.rank == 0:
        try:
            result = act()
        except Exception as error:
            problem = _describe_error(error)
    problem, result = ranks.from_zero([problem, result])
    _raise_problems(path, {0: problem} if problem else {})
    return result


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, CheckpointError) else str(error)


def _raise_problems(path: Path | str, problems: dict[int, str]) -> None:
    if problems:
        text = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        raise CheckpointError(
            text if str(path) in text else f"The checkpoint {path} could not be written: {text}"
        )
