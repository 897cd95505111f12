"""`hookline run` and `hookline convert`: programs and configurations of other systems, with Hookline in their
place.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import shlex
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hookline.cli.output import FAILED, INTERRUPTED, OK, print_result
from hookline.config import files
from hookline.config.problems import ConfigError
from hookline.interop import import_lines
from hookline.util.errors import HooklineError


def run_program(chosen: argparse.Namespace) -> int:
    """Run the program as Python would, and return its exit code."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if chosen.m else os.path.dirname(os.path.realpath(chosen.script))
    import_lines.stand_in(chosen.replace)
    if any(name in import_lines.LIGHTNING_TRAINERS for name in chosen.replace):
        try:
            import_lines.replace_lightning_trainer()
        except HooklineError as error:
            raise ConfigError(str(error), where="--as lightning") from None
    code, attributes = _module(chosen.script) if chosen.m else _script(chosen.script)
    sys.argv[:] = [attributes["__file__"] if chosen.m else chosen.script, *chosen.arguments]
    main = ModuleType("__main__")
    vars(main).update(attributes)
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        return _execute_program(code, main)
    finally:
        _explain_nothing()
        del before  # referred to until here, because functions of this command may use its names


def _script(path: str) -> tuple[CodeType | SyntaxError, dict[str, Any]]:
    """Return a script's code, or its error, and the attributes of its module."""
    full = os.path.abspath(path)
    try:
        with io.open_code(full) as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"this program cannot be read: {error.strerror}.", where=path) from None
    loader = SourceFileLoader("__main__", full)
    attributes = {"__file__": full, "__loader__": loader, "__package__": None, "__spec__": None}
    try:
        return compile(text, full, "exec", dont_inherit=True), {**attributes, "__cached__": None}
    except SyntaxError as error:
        return error.with_traceback(None), attributes


def _module(name: str) -> tuple[CodeType | SyntaxError, dict[str, Any]]:
    """Return the code of a module, as `python -m` runs it, and its attributes."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}.", where=f"-m {name}") from None
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise ConfigError(
            "there is no such module, or it is a package that cannot be run.", where=f"-m {name}"
        )
    return code, {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
        "__cached__": spec.cached,
    }


def _execute_program(code: CodeType | SyntaxError, main: ModuleType) -> int:
    """Execute the program and report its errors as Python does, without the calls of this command."""
    try:
        if isinstance(code, SyntaxError):
            raise code
        exec(code, vars(main))
    except SystemExit:
        raise  # its code is the code of the process
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return OK


def _explain_nothing() -> None:
    """Print why nothing was replaced, if the program has imported a package that can be."""
    known = [*import_lines.STAND_IN_PACKAGES, *import_lines.LIGHTNING_TRAINERS]
    used = [name for name in known if name in sys.modules]
    if used and not import_lines.replaced and os.environ.get("RANK", "0") == "0":
        print(
            f"hookline: replaced nothing, because {used[0]} is installed; add --as {used[0]} to replace it",
            file=sys.stderr,
        )


OF_PROGRAM = "not converted: what the program of LightningCLI adds, such as link_arguments and set_defaults"


def convert_config(chosen: argparse.Namespace) -> int:
    """Convert the file, write the result beside it, and print the command that runs it."""
    source = files.read_config(chosen.config)
    out = Path(chosen.out or Path(chosen.config).with_suffix(".hookline.yaml"))
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError("the configuration is written as YAML: name a .yaml file.", where=str(out))
    if out.exists() and not chosen.force:
        raise ConfigError("this file exists; add --force to replace it.", where=str(out))
    import yaml  # type: ignore[import-untyped]

    from hookline.interop.lightning import cli_files

    made = cli_files.convert(source, chosen.module, chosen.datamodule, tuple(chosen.allow))
    text = yaml.safe_dump(made.values, sort_keys=False, allow_unicode=True)
    out.write_text(
        f"# converted from {Path(chosen.config).name} by hookline convert\n{text}", encoding="utf-8"
    )
    start = ["hookline"]
    if made.devices * made.nodes > 1:
        nodes = [f"--nnodes={made.nodes}"] if made.nodes > 1 else []
        start = ["torchrun", f"--nproc-per-node={made.devices}", *nodes, "-m", "hookline"]
    allowed = dict.fromkeys([*chosen.allow, *made.packages])
    again = shlex.join([*start, "fit", str(out), *(word for name in allowed for word in ("--allow", name))])
    said = f"wrote {out}\n{OF_PROGRAM}\n\nNext: {again}"
    return print_result(chosen, {"written": str(out), "command": again}, said)
