"""The folders whose files an MCP client may open. No path and no link leads out of them."""

from __future__ import annotations

from pathlib import Path

from hookline.report.reader import check_run_dir
from hookline.report.runs import find_run_dirs
from hookline.util.errors import OptionError, closest, folders_beside
from hookline.util.text import printable

MOST_SHOWN = 10
"""The most names of runs in an error."""
STORAGE = "checkpoints"
"""The only entry of a run that may be a link to outside: storage is often elsewhere, and only manifests are
read there.
"""


class ServedFolder:
    """A folder, and the files below it that a client may name."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            kind = "is a file" if path.exists() else "does not exist"
            raise OptionError(f"{path} {kind}; pass a folder.{closest(path.name, folders_beside(path))}")
        self.root = path.resolve()

    def resolve(self, given: str) -> Path:
        """Return the path of a file or folder, without links; raise if it is outside."""
        try:
            path = (self.root / given).resolve()
        except (OSError, ValueError, RuntimeError):  # a null character, or links in a circle
            path = None
        if path is None or not path.is_relative_to(self.root):
            raise OptionError(
                f"{printable(given)!r} is not below {self.root}. This server opens nothing outside that "
                "folder."
            )
        return path

    def file(self, given: str, suffixes: tuple[str, ...]) -> Path:
        """Return the path of an existing file with one of these endings."""
        path = self.resolve(given)
        if path.suffix not in suffixes:
            raise OptionError(f"{printable(given)!r}: give a file that ends with {' or '.join(suffixes)}.")
        if not path.is_file():
            near = sorted(each.name for each in path.parent.glob("*") if each.suffix in suffixes)
            raise OptionError(
                f"There is no file {printable(given)!r} in {self.root}.{closest(path.name, near)}"
            )
        return path

    def run(self, given: str) -> Path:
        """Return the directory of a run, by its path below the folder."""
        path = self.resolve(given)
        if not path.is_dir():
            names = [self.name(each) for each in find_run_dirs(self.root, [])]
            more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
            known = f"Runs: {', '.join(names[:MOST_SHOWN])}{more}." if names else "There are no runs."
            raise OptionError(
                f"There is no run {printable(given)!r} in {self.root}.{closest(given, names)} {known}"
            )
        check_run_dir(path)
        self.check_links(path)
        return path

    def check_links(self, run_dir: Path) -> None:
        """Refuse a run whose files are links to outside the folder."""
        for entry in (*run_dir.iterdir(), *run_dir.glob("logs/*")):
            is_link = entry.is_symlink() and entry.name != STORAGE
            if is_link and not entry.resolve().is_relative_to(self.root):
                raise OptionError(
                    f"{self.name(run_dir)} is not opened: its {entry.relative_to(run_dir)} is a link to "
                    f"outside {self.root}."
                )

    def name(self, path: Path) -> str:
        """Return the name of a run, which is its path below the folder."""
        return path.relative_to(self.root).as_posix()
