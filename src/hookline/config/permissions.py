"""Decide which class paths may be imported, before any import, because importing runs code."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hookline.engine.registry import offered_hooks, package_hooks
from hookline.util.errors import HooklineError, closest

ALWAYS = ("hookline", "torch.nn", "torch.optim")
"""Packages of allowed classes, if the class is of the kind that its key accepts."""
FUNCTIONS = ("torch.nn.functional", "torch.nn.init", "torch.optim")
"""Modules of allowed functions. Hookline's own are left out, because some of them remove files."""
LIBRARIES = frozenset(
    {
        "cloudpickle",
        "dask",
        "datasets",
        "dill",
        "fsspec",
        "joblib",
        "jsonargparse",
        "keras",
        "lightning",
        "numpy",
        "pandas",
        "pip",
        "pkg_resources",
        "pytorch_lightning",
        "scipy",
        "setuptools",
        "sklearn",
        "torch",
        "torchaudio",
        "torchvision",
        "transformers",
        "yaml",
    }
)
"""Libraries that load pickles, write files or run code. A file cannot allow them, however installed."""
PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*(?:[.:][^\W\d]\w*)?")


class Permissions:
    """The packages that class paths may name: Hookline, packages that offer hooks, the configuration's own
    folder, and those that the user allows.
    """

    def __init__(self, folder: Path | None = None, allow: Iterable[str] = (), trusted: bool = False) -> None:
        self.folder = folder
        self.trusted = trusted
        """Whether the paths come from the user's own program and not from a file."""
        offered = {each.value.partition(":")[0].partition(".")[0] for each in package_hooks()}
        self.prefixes = tuple(dict.fromkeys([*ALWAYS, *sorted(offered), *allow]))

    def refusal(self, path: str) -> str:
        """Return why this path may not be imported, or an empty string if it may."""
        if self.trusted or _is_below(path, self.prefixes):
            return ""
        top = path.partition(".")[0]
        if top in self._beside():
            return self._shadow(top)
        places = (
            [*self.prefixes, f"modules in {self.folder}"] if self.folder is not None else [*self.prefixes]
        )
        tops = [
            each
            for each in (*self._beside(), *(each.partition(".")[0] for each in self.prefixes))
            if each != top
        ]
        near = closest(top, tops).partition("'")[2].partition("'")[0]
        hint = f" Did you mean {near + path.removeprefix(top)!r}?" if near else ""
        in_file = "" if why_not_own(top) else f', or `allow = ["{top}"]` in the file'
        return (
            f"{path!r} may not be imported from here, and was not.{hint} Allowed: {', '.join(places)}. "
            f"If you trust it: --allow {top}{in_file}."
        )

    def refusal_of(self, path: str, found: Any, *, function: bool = False) -> str:
        """Return why the object that a path names may not be used, or an empty string if it may.

        Check the module that defines the object and every module on the path: `mine.os.system` is os.system.
        function: the object is called with arguments that are not in the configuration.
        """
        refused = "" if self.trusted else self._detour(path, found, function)
        return (
            ""
            if refused and path in {each.replace(":", ".") for each in offered_hooks().values()}
            else refused
        )

    def _detour(self, path: str, found: Any, function: bool) -> str:
        first, *names = path.split(".")
        if any(each.startswith("__") for each in names):
            return f"{path!r} names a special attribute of Python."
        there: Any = sys.modules.get(first)
        for depth, name in enumerate(names, 2):
            there = getattr(there, name, None)
            is_elsewhere = (
                inspect.ismodule(there)
                and there is not found
                and there.__name__.split(".") != [first, *names][:depth]
            )
            if is_elsewhere and (refused := self.refusal(there.__name__)):
                return f"this leads to {there.__name__}, and {refused}"
        home, qualified = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
        if inspect.isbuiltin(found) and path.rpartition(".")[0] in FUNCTIONS:
            home = None  # torch.nn.functional.gelu: an operation of torch's compiled part
        if home and qualified and (refused := self.refusal(f"{home}.{qualified}")):
            return f"this leads to {home}.{qualified}, and {refused}"
        is_hidden = _is_below(path, ALWAYS) and not _is_below(
            path, [each for each in self.prefixes if each not in ALWAYS]
        )
        if (
            function
            and callable(found)
            and not inspect.isclass(found)
            and is_hidden
            and not _is_below(path, FUNCTIONS)
        ):
            return (
                f"{path!r} is not a function for configurations. Functions may come from "
                f"{', '.join(FUNCTIONS)} and from modules of your own."
            )
        return ""

    def _beside(self) -> list[str]:
        """Return the modules and packages in the configuration's own folder, without names of the standard
        library.
        """
        if self.folder is None:
            return []
        names = [
            each.stem if each.suffix == ".py" else each.name
            for each in self.folder.iterdir()
            if each.suffix == ".py" or (each.is_dir() and any(each.glob("*.py")))
        ]
        return [name for name in names if name.isidentifier() and name not in sys.stdlib_module_names]

    def _shadow(self, top: str) -> str:
        """Return the error about another loaded module of this name, which an import would return."""
        loaded = getattr(sys.modules.get(top), "__file__", None)
        if loaded is None or self.folder is None or Path(loaded).resolve().is_relative_to(self.folder):
            return ""
        return (
            f"{top!r} is in {self.folder}, but another module of that name is loaded already, from "
            f"{loaded}. Rename yours."
        )

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Set jsonargparse's import policy for a block, because it imports nested class paths.

        For a parameter of type `Any`, make objects only from the class paths of a trusted program.
        """
        from jsonargparse import set_parsing_settings

        with _settings_restored():
            if not self.trusted:
                allowed = [*self.prefixes, *(each for each in self._beside() if not self._shadow(each))]
                set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=allowed)
            set_parsing_settings(instantiate_subclass_spec_in_any=self.trusted)
            yield

    def open_folder(self) -> None:
        """Make modules beside the file importable, as beside a script."""
        if self.folder is not None and str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))


@contextlib.contextmanager
def _settings_restored() -> Iterator[None]:
    """Restore jsonargparse's settings at the end of a block.

    This is the only use of a private name of jsonargparse: its settings belong to the process,
    `set_parsing_settings` only adds to the lists, and no public function reads or resets them. Without it, a
    configuration would widen what the next one may import.
    """
    try:
        from jsonargparse import _common

        settings = _common.parsing_settings
        before = dict(settings)
    except (ImportError, AttributeError, TypeError):
        version = importlib.metadata.version("jsonargparse")
        raise HooklineError(
            f"Hookline cannot restrict imports with jsonargparse {version}, because its settings have moved. "
            "Install jsonargparse 4.53."
        ) from None
    try:
        yield
    finally:
        settings.update(before)


def _is_below(path: str, prefixes: Iterable[str]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in prefixes)


def why_not_own(path: str) -> str:
    """Return why a file cannot allow this path, or an empty string for a package of the user's own.

    The standard library and packages from an index have classes and functions that write files and run code.
    Only the command line can allow them. Nothing is imported here.
    """
    top = path.partition(".")[0]
    if _is_below(path, ALWAYS):
        return ""
    if top in sys.stdlib_module_names:
        return "is part of Python and can run commands or write files"
    if top in LIBRARIES:
        return "is a library that can run code or write files"
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ""  # a loaded module without a file; `refusal` and the import decide
    places = (
        [Path(each) for each in (*(spec.submodule_search_locations or ()), spec.origin) if each]
        if spec is not None
        else []
    )
    sites = {
        above for each in places for above in each.parents if above.name in ("site-packages", "dist-packages")
    }
    return (
        "is an installed package and not your own"
        if sites and not any(_is_from_a_folder(top, each) for each in sites)
        else ""
    )


def _is_from_a_folder(top: str, site: Path) -> bool:
    """Return whether a package was installed from a folder or repository, not from an index or by conda."""
    for origin in site.glob("*.dist-info/direct_url.json"):  # not written for a package from an index
        found = importlib.metadata.Distribution.at(origin.parent)
        listed = (found.read_text("top_level.txt") or "").split()
        names = listed or [each.parts[0].removesuffix(".py") for each in found.files or ()]
        if top in names and (found.read_text("INSTALLER") or "").strip() != "conda":
            return bool({"dir_info", "vcs_info"} & set(json.loads(origin.read_text(encoding="utf-8"))))
    return False
