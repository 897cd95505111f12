"""The directory of a run: everything a run writes is below it."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hookline.engine.checks import check_writable_directory
from hookline.run.options import Options
from hookline.util.errors import OptionError

if TYPE_CHECKING:
    from hookline.run.lock import RunLock

LAST = "last"
LAST_STATE = "last-state"
"""Names of the final checkpoint. The second is used where another checkpoint has the first name."""


class RunDirectory:
    """`run_dir`, or a new name below `default_root_dir/runs` for every run; made when something is first
    written.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._named: Path | None = None
        self._used = False
        self._home = Path.cwd()
        self._lock: RunLock | None = None
        self._on_lost: Callable[[str], None] | None = None
        """Set while this process is to have the directory to itself."""

    def _here(self, path: str | os.PathLike[str]) -> Path:
        """A relative path means what it meant when the trainer was made, also if the process
        has moved since.
        """
        return Path(path) if Path.cwd() == self._home else self._home / path

    def renew(self) -> None:
        """A run begins: it gets a directory of its own, or the one that was already asked for."""
        if self._options.run_dir is not None:
            check_writable_directory("run_dir", self._here(self._options.run_dir))
        elif (
            self._here(self._options.default_root_dir).absolute() != self._home
        ):  # which may be read-only if nothing is written
            check_writable_directory("default_root_dir", self._here(self._options.default_root_dir))
        if self._used:
            self._named = None
        self._used = True

    @property
    def root(self) -> Path:
        """What all runs without a `run_dir` have in common."""
        return self._here(self._options.default_root_dir) / "runs"

    @property
    def searched(self) -> Path:
        """Where checkpoints of this run are looked for: in its own directory, or in all runs if it has no
        name.
        """
        return self.root if self._options.run_dir is None else self._here(self._options.run_dir)

    def existing(self) -> Path | None:
        """The directory that this run was given by name or goes on in, if it is there."""
        given = self._here(self._options.run_dir) if self._options.run_dir is not None else self._named
        return given if given is not None and given.is_dir() else None

    def continue_in(self, path: Path) -> None:
        """A resumed run goes on where it was."""
        self._named = path
        self._take_lock(path)

    # ---- its lock ------------------------------------------------------------------------------------------

    def hold(self, on_lost: Callable[[str], None]) -> None:
        """Keep other jobs out from now on: of a directory that has a name at once, of a new one when it is
        made.

        on_lost: called from a thread if another job has taken the directory over nevertheless.
        """
        self._on_lost = on_lost
        if self._options.run_dir is not None:
            self._take_lock(self._here(self._options.run_dir))
        elif self._named is not None and self._here(self._named).is_dir():
            self._take_lock(self._here(self._named))

    def release(self) -> None:
        """Let other jobs in again."""
        lock, self._lock, self._on_lost = self._lock, None, None
        if lock is not None:
            lock.release()

    @property
    def has_name(self) -> bool:
        """Whether the user has named it; else it is one of many below `root`."""
        return self._options.run_dir is not None

    def has_made(self, folder: Path) -> bool:
        """Whether this folder is the run's, and was not there before it began."""
        return self._lock is not None and self._lock.made_folder and self._lock.folder == folder

    @property
    def is_locked(self) -> bool:
        """Whether no other job writes into it."""
        return self._lock is not None and self._lock.is_held

    def _take_lock(self, path: Path) -> None:
        if self._on_lost is None or (
            self._lock is not None and self._lock.folder.absolute() == path.absolute()
        ):
            return
        from hookline.run.lock import RunLock  # with the first run that writes something

        if self._lock is not None:
            self._lock.release()
        self._lock = RunLock(path, self._on_lost)
        self._lock.take()

    def chosen(self) -> str:
        """The directory's name, made if it is a new one: what rank zero tells the others."""
        return str(self.path().absolute())

    def intended(self) -> Path:
        """The directory, which need not exist yet: for those who only want to know where something would be
        written.
        """
        if self._options.run_dir is not None:
            return self._here(self._options.run_dir)
        if (
            self._named is None
        ):  # nothing is made that would keep others from the name, so it has this process's number
            name = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}"
            self._named = self.root / name
        return self._here(self._named)

    def path(self) -> Path:
        """The directory, which exists from now on."""
        if self._options.run_dir is not None:
            path = self._here(self._options.run_dir)
        elif self._named is not None:
            path = self._here(self._named)
        else:
            base = self.root
            name = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            candidates = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2)))
            path = self._named = next(base / each for each in candidates if _made(base / each))
        _make(path)
        self._take_lock(path)
        return path


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"The run's directory {path} cannot be made ({error.strerror or error}); choose another place by "
            "Trainer(run_dir=...) or default_root_dir."
        ) from None


def _made(path: Path) -> bool:
    """Make a directory that was not there; of several processes that start together, one gets it."""
    _make(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True
