"""The command line. What is heavy is imported by the command that needs it, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from hookline._version import __version__
from hookline.cli.codes import BROKEN_PIPE, FAILED, INTERRUPTED, OK, USAGE

RUNS = {
    "fit": "train",
    "validate": "measure on the validation data",
    "test": "measure on the test data",
    "predict": "write predictions to predictions.jsonl in the run's directory",
    "explain": "show the lifecycle of a run with its listeners, without running it",
}
CODES = """exit codes: 0 it went well (also a run that a hook stopped), 1 the run failed, 2 a wrong command or configuration,
124 something hung and was told to end the process, 130 stopped by Ctrl-C, 138 by SIGUSR1, 143 by SIGTERM (all three: saved, and
the way to continue is printed), 141 whoever read the output went away"""
CHECKPOINT_CODES = """PATH is a checkpoint, a directory with checkpoints below it (a run), or an fsspec URL such as s3://bucket/run.

exit codes: 0 it went well, 1 a checkpoint is damaged or cannot be read, 2 a wrong command"""
REPORT_CODES = "exit codes: 0 it was written, 2 a wrong command, or no directory of a run"
OVERRIDES = """Any key of the configuration can be set here, after the file:
  --trainer.max_epochs 3  --hooks.stop.patience 9  --module.width=64  --hooks.bar false"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _command(given)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again when it exits
        return BROKEN_PIPE
    except Exception as error:
        return _report(error, given)


def _command(given: list[str]) -> int:
    parser = make_parser()
    overrides: list[str] = []
    if given and given[0] in RUNS:
        from hookline.config.files import split_overrides  # needs neither torch nor jsonargparse
        from hookline.config.load import TYPED

        pairs, given = split_overrides(given, TYPED)
        overrides = [f"--{key}={text}" for key, text in pairs]
    chosen = parser.parse_args(given)
    if chosen.command in RUNS:
        from hookline.cli import runs

        return runs.run(chosen, overrides)
    if chosen.command == "new":
        from hookline import scaffold

        for path in scaffold.write_project(chosen.directory):
            print(f"wrote {path}")
        print(f"\nNext: cd {chosen.directory} && hookline fit run.toml && python -m pytest")
        return OK
    if chosen.command == "checkpoint":
        from hookline.cli import checkpoints

        return checkpoints.run(chosen)
    if chosen.command == "report":
        from hookline.cli import reports

        return reports.run(chosen)
    from hookline.cli import lists
    from hookline.config.problems import ConfigError
    from hookline.errors import HookError

    try:
        return lists.show(chosen)
    except HookError as error:  # a name that does not exist
        raise ConfigError(str(error)) from None


class _Parser(argparse.ArgumentParser):
    """Wrong options end with a hint about where a key of the configuration belongs."""

    def error(self, message: str) -> Any:
        """As argparse, with the hint."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        for each in unknown[:1]:
            from hookline.config.trainer import option_names

            name = each.lstrip("-").partition("=")[0].replace("-", "_")
            if name in option_names():
                message += f"\nThis is an option of the trainer: --trainer.{name}"
        super().error(message)


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = _Parser("hookline", description="Train PyTorch models with every moment of the training open to hooks.",
                     epilog=CODES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"hookline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, doc: str, epilog: str = "", group: Any = commands) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = group.add_parser(
            name, help=doc, description=f"{doc[0].upper()}{doc[1:]}.", epilog=epilog or CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
        added.add_argument("--json", action="store_true", help="for programs: one JSON document on stdout")
        return added

    for name, doc in RUNS.items():
        added = command(name, doc, f"{OVERRIDES}\n\n{CODES}")
        added.add_argument("config", metavar="CONFIG", help="a .toml or .yaml file")
        added.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help="class paths may also name this")
        added.add_argument("--hook", action="append", default=[], metavar="HOOK", help="add a hook, by name or class path")
        if name == "explain":
            added.add_argument("--verb", choices=[each for each in RUNS if each != "explain"], default="fit")
            added.add_argument("--all", action="store_true", help="also events that nobody listens to")
        else:
            added.add_argument("--traceback", action="store_true", help="show where an error of Hookline was raised")
    added = command("hooks", "list the hooks there are, or describe one")
    added.add_argument("name", nargs="?", metavar="NAME")
    added = command("events", "list the events of a run, or describe one")
    added.add_argument("name", nargs="?", metavar="NAME")
    command("schema", "print the JSON schema of a configuration, for editors")
    added = command("new", "write a small project: a module, a hook, a configuration, a test for the hook")
    added.add_argument("directory", metavar="DIR")
    added = command("report", "write a page about a run, or several side by side, as one HTML file", REPORT_CODES)
    added.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="a run's directory; the run may still be running")
    added.add_argument("--out", metavar="FILE", help="FILE.html; by default report.html in RUN_DIR, of several runs here")
    about = "look into checkpoints, verify them, or export their weights"
    whole = commands.add_parser("checkpoint", help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=CHECKPOINT_CODES,
                                formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
    _checkpoint_commands(command, whole.add_subparsers(dest="action", required=True, metavar="COMMAND"))
    return parser


def _checkpoint_commands(command: Any, group: Any) -> None:
    added = command("show", "say what a checkpoint holds, or list those of a run", CHECKPOINT_CODES, group)
    added.add_argument("path", metavar="PATH")
    added.add_argument("--tensors", action="store_true", help="also every weight with its type and shape")
    added = command("verify", "read every file of a checkpoint, or of all those of a run", CHECKPOINT_CODES, group)
    added.add_argument("paths", metavar="PATH", nargs="+")
    added = command("export", "write the weights alone, for other tools", CHECKPOINT_CODES, group)
    added.add_argument("path", metavar="PATH", help="of a run: its newest whole checkpoint")
    added.add_argument("out", metavar="OUT", help="FILE.safetensors, or FILE.pt for torch.load(weights_only=True)")
    added.add_argument("--hook", metavar="NAME", help="the weights that this hook keeps, such as weight_averaging")
    added.add_argument("--force", action="store_true", help="replace OUT if it exists")


def _report(error: Exception, given: list[str]) -> int:
    """Say what went wrong: errors about a configuration in words, others as Python does."""
    from hookline.config.problems import ConfigError
    from hookline.errors import HooklineError, OptionError

    notes: list[str] = getattr(error, "__notes__", [])
    trained = bool(notes) and not any(note.endswith(" step 0") for note in notes)
    settled = isinstance(error, ConfigError) or (isinstance(error, OptionError) and not trained)
    if "--json" in given:
        about = error.data() if isinstance(error, ConfigError) else {"problem": str(error), "notes": notes}
        print(json.dumps({"error": {"type": type(error).__name__, **about}}))
    if isinstance(error, HooklineError) and "--traceback" not in given:
        print("\n".join([f"hookline: {error}", *(f"  {note}" for note in notes if not settled)]), file=sys.stderr)
    else:
        traceback.print_exception(error)
    return USAGE if settled else FAILED
