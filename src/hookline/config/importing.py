"""From a dotted path to what it names: permission first, then the import."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from hookline.config.files import Source
from hookline.config.permissions import Permissions
from hookline.config.problems import nearest


def import_path(
    source: Source,
    key: str,
    path: str,
    permissions: Permissions,
    fits: Callable[[Any], bool],
    given: str = "",
    *,
    function: bool = False,
) -> Any:
    """What `package.module.name` (or `package.module:name`) names. `fits` tells which names to offer if there
    is no such one.

    `given` is what the file says, if that is not the path itself; `function`: a function will do, and not
    only a class.
    """
    dotted, given = path.replace(":", "."), given or path
    if refusal := permissions.refusal(dotted):
        raise source.wrong(key, refusal, given)
    permissions.open_folder()
    found = _look_up(source, key, dotted, fits, given)
    if refusal := permissions.refusal_of(dotted, found, function=function):
        raise source.wrong(key, refusal, given)
    return found


def _look_up(source: Source, key: str, dotted: str, fits: Callable[[Any], bool], given: str) -> Any:
    module, _, name = dotted.rpartition(".")
    try:
        return pkgutil.resolve_name(f"{module}:{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{dotted}.".startswith(f"{error.name}."):
            error.add_note(f"while importing {dotted} for {key} of {source.name}")
            raise  # the module is there, and needs another one that is not
        if module.rpartition(".")[0] and error.name == module:  # perhaps something inside a class
            try:
                return pkgutil.resolve_name(f"{module.rpartition('.')[0]}:{module.rpartition('.')[2]}.{name}")
            except (ModuleNotFoundError, AttributeError):
                pass
        problem = f"there is no module {error.name!r}. Is it installed, or beside the file?"
        raise source.wrong(key, problem, given) from None
    except AttributeError as error:
        if "has no attribute" not in str(error):
            raise
        there = pkgutil.resolve_name(module)
        names = [
            each for each in dir(there) if not each.startswith("_") and callable(getattr(there, each, None))
        ]
        fitting = [each for each in names if fits(getattr(there, each))]
        own = [each for each in fitting if getattr(getattr(there, each), "__module__", "") == module]
        # of a single file only its own; a package is there to offer what its files have
        offered = (fitting if hasattr(there, "__path__") else own) or fitting or names
        raise source.wrong(
            key, f"{module} has no {name!r}.{nearest(name, offered, 'It has')}", given
        ) from None


def is_a(kinds: tuple[type, ...]) -> Callable[[Any], bool]:
    """Whether something is a subclass of one of these."""
    return lambda found: inspect.isclass(found) and issubclass(found, kinds)
