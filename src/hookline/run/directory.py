"""The directory of a run, which holds everything that the run writes."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import re
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
ROLLBACK = "rollback"
"""The name of the checkpoint after a rollback, in a run that does not keep `checkpoints/last`."""

DATED = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?")
"""The names that `RunDirectory` gives: the time of the start, and a number if it is taken."""


class RunDirectory:
    """`run_dir`, or a new directory below `default_root_dir/runs`; created at the first write."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._named: Path | None = None
        self._used = False
        self.is_abandoned = False
        """Whether the current fit was refused, so that it leaves no directory."""
        self.has_run = False
        """Whether a fit of this trainer has begun."""
        self._earlier: list[Path] = []
        """The directories of its earlier runs, the newest first."""
        self._home = Path.cwd()
        self._lock: RunLock | None = None
        self._on_lost: Callable[[str], None] | None = None
        """Set while this process holds, or will take, the lock of the directory."""

    def _here(self, path: str | os.PathLike[str]) -> Path:
        """Return a relative path as of the working directory in which the trainer was made."""
        return Path(path) if Path.cwd() == self._home else self._home / path

    def renew(self) -> None:
        """Choose a new directory for the next run, unless the current one is still unused."""
        if self._options.run_dir is not None:
            check_writable_directory("run_dir", self._here(self._options.run_dir))
        # the working directory may be read-only if the run writes nothing
        elif self._here(self._options.default_root_dir).absolute() != self._home:
            check_writable_directory("default_root_dir", self._here(self._options.default_root_dir))
        if self._used and self._named is not None:
            self._earlier = [self._named, *(each for each in self._earlier if each != self._named)]
            self._named = None
        self._used = True

    @property
    def root(self) -> Path:
        """The parent directory of all runs without a `run_dir`."""
        return self._here(self._options.default_root_dir) / "runs"

    @property
    def searched(self) -> Path:
        """Where checkpoints are searched: `run_dir`, the directory of the trainer's newest run, or `root`."""
        if self._options.run_dir is not None:
            return self._here(self._options.run_dir)
        return self._here(self._earlier[0]) if self.has_run and self._earlier else self.root

    def searched_runs(self) -> list[Path]:
        """Return the directories of runs to search for checkpoints.

        Those are `run_dir`; of a trainer that has had a run, the directories of its runs; else those below
        `root` that have a generated name. Another program has chosen the other names.
        """
        if self._options.run_dir is not None:
            return [self.searched]
        if self.has_run:
            return [self._here(each) for each in self._earlier]
        names = os.listdir(self.root) if self.root.is_dir() else []
        return [self.root / name for name in sorted(names) if DATED.fullmatch(name)]

    def existing(self) -> Path | None:
        """Return the directory that this run was given or continues in, if it exists."""
        given = self._here(self._options.run_dir) if self._options.run_dir is not None else self._named
        return given if given is not None and given.is_dir() else None

    def own_runs(self) -> list[Path]:
        """Return the existing directories of this trainer's runs, the newest first."""
        named = [] if self._named is None else [self._named]
        given = [self._options.run_dir] if self._options.run_dir is not None else [*named, *self._earlier]
        return [path for each in given if (path := self._here(each)).is_dir()]

    def continue_in(self, path: Path) -> None:
        """Continue a resumed run in its directory, unless another job holds its lock."""
        self._take_lock(path)
        self._named = path

    # ---- its lock ------------------------------------------------------------------------------------------

    def hold(self, on_lost: Callable[[str], None], at_once: bool = True) -> None:
        """Lock the directory for this job: a named one now, a new one when it is created.

        on_lost: called from a thread if another job has taken the directory nevertheless. at_once: False:
        lock a named one only when something is written there.
        """
        self._on_lost = on_lost
        if not at_once:
            return
        if self._options.run_dir is not None:
            self._take_lock(self._here(self._options.run_dir))
        elif self._named is not None and self._here(self._named).is_dir():
            self._take_lock(self._here(self._named))

    def release(self) -> None:
        """Release the lock. An empty directory of a refused fit is removed."""
        lock, self._lock, self._on_lost = self._lock, None, None
        if lock is not None:
            lock.release()
        if self.is_abandoned and self._named is not None and self._options.run_dir is None:
            with contextlib.suppress(OSError):  # it has files
                self._here(self._named).rmdir()
                self._named = None
        self.is_abandoned = False

    @property
    def has_name(self) -> bool:
        """Whether the user gave a `run_dir`; otherwise the directory is below `root`."""
        return self._options.run_dir is not None

    def has_made(self, folder: Path) -> bool:
        """Return whether this run created the folder."""
        return self._lock is not None and self._lock.made_folder and self._lock.folder == folder

    @property
    def is_locked(self) -> bool:
        """Whether this job holds the lock."""
        return self._lock is not None and self._lock.is_held

    def _take_lock(self, path: Path) -> None:
        if self._on_lost is None or (
            self._lock is not None and self._lock.folder.absolute() == path.absolute()
        ):
            return
        from hookline.run.lock import RunLock  # imported only for runs that write something

        if self._lock is not None:
            self._lock.release()
        self._lock = RunLock(path, self._on_lost)
        self._lock.take()

    def chosen(self) -> str:
        """Return the directory's path, created if it is new; rank zero sends it to the other ranks."""
        return str(self.path().absolute())

    def intended(self) -> Path:
        """Return the directory without creating it."""
        if self._options.run_dir is not None:
            return self._here(self._options.run_dir)
        if self._named is None:  # the pid makes the name unique, because no directory reserves it
            self._named = self.root / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}"
        return self._here(self._named)

    def path(self) -> Path:
        """Create the directory if necessary, and return it."""
        if self._options.run_dir is not None:
            path = self._here(self._options.run_dir)
        elif self._named is not None:
            path = self._here(self._named)
        else:
            base = self.root
            name = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            candidates = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2)))
            path = self._named = next(base / each for each in candidates if _make_new_directory(base / each))
        _make_directory(path)
        self._take_lock(path)
        return path


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"The run's directory {path} cannot be created ({error.strerror or error}); choose another one "
            "with Trainer(run_dir=...) or default_root_dir."
        ) from None


def _make_new_directory(path: Path) -> bool:
    """Create a directory; return False if it exists, so that only one of several processes gets it."""
    _make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True
