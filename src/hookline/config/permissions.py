"""Where class paths may import from. Checked before anything is imported, because importing runs code."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hookline.errors import closest
from hookline.registry import GROUP

ALWAYS = ("hookline", "torch.nn", "torch.optim")
PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*(?:[.:][^\W\d]\w*)?")


class Permissions:
    """Hookline itself, packages that offer hooks, the configuration's own folder, and what the user allows."""

    def __init__(self, folder: Path | None = None, allow: Iterable[str] = (), trusted: bool = False) -> None:
        self.folder = folder
        self.trusted = trusted
        """The paths come from the user's own program, not from a file."""
        offered = {each.value.partition(":")[0].partition(".")[0] for each in importlib.metadata.entry_points(group=GROUP)}
        self.prefixes = tuple(dict.fromkeys([*ALWAYS, *sorted(offered), *allow]))

    def refusal(self, path: str) -> str:
        """Why this path may not be imported; an empty string if it may."""
        if self.trusted or any(path == each or path.startswith(f"{each}.") for each in self.prefixes):
            return ""
        top = path.partition(".")[0]
        if top in self._beside():
            return self._shadow(top)
        places = [*self.prefixes, f"modules in {self.folder}"] if self.folder is not None else [*self.prefixes]
        tops = [each for each in (*self._beside(), *(each.partition(".")[0] for each in self.prefixes)) if each != top]
        near = closest(top, tops).partition("'")[2].partition("'")[0]
        hint = f" Did you mean {near + path.removeprefix(top)!r}?" if near else ""
        in_file = "" if dangerous(top) else f", or `allow = [\"{top}\"]` in the file"
        return (f"{path!r} may not be imported from here, and was not.{hint} Allowed: {', '.join(places)}. "
                f"If you trust it: --allow {top}{in_file}.")  # fmt: skip

    def _beside(self) -> list[str]:
        """The modules and packages in the configuration's own folder; names of Python's own modules stay Python's."""
        if self.folder is None:
            return []
        names = [each.stem if each.suffix == ".py" else each.name for each in self.folder.iterdir()
                 if each.suffix == ".py" or (each.is_dir() and any(each.glob("*.py")))]  # fmt: skip
        return [name for name in names if name.isidentifier() and name not in sys.stdlib_module_names]

    def _shadow(self, top: str) -> str:
        """A module of the same name that is loaded already is what an import would give."""
        loaded = getattr(sys.modules.get(top), "__file__", None)
        if loaded is None or self.folder is None or Path(loaded).resolve().is_relative_to(self.folder):
            return ""
        return f"{top!r} is in {self.folder}, but another module of that name is loaded already, from {loaded}. Rename yours."

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """For nested class paths, which jsonargparse imports: its own policy, set for the length of a block."""
        from jsonargparse import _common, set_parsing_settings

        before = dict(_common.parsing_settings)
        try:
            if not self.trusted:
                allowed = [*self.prefixes, *(each for each in self._beside() if not self._shadow(each))]
                set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=allowed)
            set_parsing_settings(instantiate_subclass_spec_in_any=True)
            yield
        finally:
            _common.parsing_settings.update(before)  # there is no public way to take a policy back

    def open_folder(self) -> None:
        """Modules beside the file can be imported, as beside a script."""
        if self.folder is not None and str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))


def dangerous(path: str) -> bool:
    """Modules that run commands or write files: a file cannot allow them, only the person at the command line can."""
    from jsonargparse import _common

    return any(path == each or path.startswith(f"{each}.") for each in _common.default_import_path_denylist)
