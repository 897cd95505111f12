"""The command line. Heavy modules are imported by the command that needs them, so that `--help` is fast.

May import: util, engine, loggers, distributed, run, checkpoint, reliability, tracing, digests, control,
training, config, report, interop, rewind, watch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hookline._version import __version__
from hookline.cli.output import BROKEN_PIPE, INTERRUPTED, OK, USAGE, on_one_rank, print_error
from hookline.util.errors import closest

RUNS = {
    "fit": "train",
    "validate": "measure on the validation data",
    "test": "measure on the test data",
    "predict": "write predictions to predictions.jsonl in the run's directory",
    "explain": "show the lifecycle of a run with its listeners, without running it",
}
SYSTEMS = ("lightning", "pytorch_lightning", "trainers", "model_training_framework", "kempnerforge")
CODES = """\
exit codes: 0 success (also a run that a hook stopped), 1 the run failed, 2 a wrong command or configuration,
3 a run differs from its log or from another (rewind, diverge), 124 the watchdog ended a process that hung,
130 stopped by Ctrl-C, 138 by SIGUSR1, 143 by SIGTERM (all three save and print how to continue), 141 the
reader of the output was closed"""
CHECKPOINT_CODES = """PATH is a checkpoint, a directory with checkpoints below it (a run), or an fsspec URL
such as s3://bucket/run.

exit codes: 0 success, 1 a checkpoint is damaged or cannot be read, 2 a wrong command"""
EXPORT_CODES = """FORMAT is one of
  torch         OUT.pt, a state_dict for torch.load(weights_only=True)
  safetensors   OUT.safetensors
  hf-sharded    a folder, for from_pretrained of transformers
  dcp           a folder, for torch.distributed.checkpoint
  onnx          OUT.onnx, a program for ONNX Runtime
  torch-export  OUT.pt2, a program for torch.export.load

onnx and torch-export make the module and a batch of its data from a configuration: CONFIG, or the one in
the run's run.json. Class paths are allowed as for `hookline fit`; those of run.json need --allow.

exit codes: 0 success, 1 a checkpoint is damaged or cannot be exported, 2 a wrong command"""
IMPORT_CODES = """SOURCE is one of
  a file of torch.save or Lightning (.pt, .ckpt)
  a .safetensors file
  a folder of transformers (model.safetensors, or shards with an index)
  a folder of torch.distributed.checkpoint
No code from it is run. The checkpoint has weights only: it can be validated, tested, exported and loaded with
hookline.load_weights; a run cannot be resumed from it.

exit codes: 0 success, 1 SOURCE is damaged, or requests code, 2 a wrong command"""
REPORT_CODES = "exit codes: 0 success, 2 a wrong command, or not the directory of a run"
RUNS_CODES = """\
The best value is that of the metric that a hook monitors, else of the validation loss. The age counts from
the first start. A run that has not ended is running or was killed; the lock of its directory shows which.
`killed?` means that it may be running on another machine.

exit codes: 0 success, 2 a wrong command, or the directory does not exist"""
SUMMARY_CODES = """\
The hook that monitors a metric decides whether lower or higher is better, else its name does (loss, error,
accuracy, ...). The trend compares the two halves of the last third of the values.
--json prints these rules too.

exit codes: 0 success, 2 a wrong command, or not the directory of a run"""
SAMPLES_CODES = """\
Loader, rank, batch and dataset index of every sample, computed from run.json: it needs neither the program
nor the data, if torch's samplers make the order.

exit codes: 0 success, 1 the samples cannot be computed, 2 a wrong command, or not the directory of a run"""
WATCH_CODES = "exit codes: 0 ended by Ctrl-C, 2 a wrong command, or not the directory of a run"
CONTROL_CODES = """ACTION is one of
  status                progress, hooks and their cost; the default
  enable HOOK           enable a hook
  disable HOOK          disable a hook
  every HOOK INTERVAL   call the hook at this interval: 200 steps, 10 minutes
  checkpoint            save now
  stop                  end the run after this step, as at its regular end
  attach FILE.py:CLASS  add a hook from a file; attaching it again replaces it
  detach HOOK           remove a hook that was attached
  validate              validate now, and print the metrics
  lr VALUE              set the learning rate of all parameter groups, or of --group: 1e-4,
                        or x0.5 to multiply it; a schedule continues in proportion

All ranks carry out the action at the next step and log it; status answers at once.

exit codes: 0 success, 1 no job is running there or it rejected the request, 2 a wrong command"""
MCP_CODES = """\
The assistant can read the runs below DIR and nothing else. --control lets it switch hooks, validate, change
the learning rate, save and stop. --code DIR lets it explain configurations below DIR, and with --control
attach hooks from files below DIR to a running job: both run this code as you. It needs hookline[mcp].

exit codes: 0 the client closed the connection, 2 a wrong command, or the directory does not exist"""
TRACE_CODES = (
    "exit codes: 0 success, 1 the hook failed or requests a fact that was not recorded, 2 a wrong "
    "command, or not a trace"
)
DIVERGE_CODES = """\
Runs write digests with Trainer(digest="every 10 steps"), or hookline fit CONFIG --trainer.digest "every 10
steps". If the digests do not show the step or the module, both runs are run again from a checkpoint before,
with digests of every step and module; nothing is written into them. Without digests the logs are compared.

exit codes: 0 the runs are equal, 3 they diverge, 2 a wrong command, or not the directory of a run"""
REWIND_CODES = """\
The run begins again at its newest complete checkpoint before step N, or at its beginning, and pauses after
update N: the last event is on_step_end of step N. What it logs on the way is compared with its log.jsonl, to
the bit. Nothing is written into RUN. Its loggers are replaced, and hooks that only observe or act outside of
the training are left out (docs: "Rewind"). With several ranks: torchrun ... -m hookline rewind.

exit codes: 0 success (also if values differ on another machine or with other versions), 1 the run failed, 2 a
wrong command, 3 values differ from the log on the same machine with the same versions"""
RUN_CODES = """\
A program whose import lines name one of these systems runs unchanged. Packages that are not installed need
no option.
  trainers, model_training_framework, kempnerforge   Hookline's modules stand in for them
  lightning, pytorch_lightning                       with --as lightning, their Trainer is Hookline's
                                                     In a script: import hookline.interop.run_as_lightning

Options for hookline come before SCRIPT. The exit code is that of the program; 2 a wrong command."""
CONVERT_CODES = """\
--module and --datamodule are for programs that pass their classes to LightningCLI, so that the file has only
the arguments. All problems are reported together.

exit codes: 0 success, 2 a wrong command, or a value that Hookline does not have"""
OVERRIDES = "any key of the file: --trainer.max_epochs 3, --hooks.stop.patience=9, --hooks.bar false"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    arguments: those of the command line; None: of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _command(given)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # otherwise Python reports the error again when it exits
        return BROKEN_PIPE
    except Exception as error:
        return print_error(error, given)


def _command(given: list[str]) -> int:
    overrides, sections = list[str](), dict[str, str]()
    if given and given[0] in RUNS:
        from hookline.config.files import split_overrides  # needs neither torch nor jsonargparse
        from hookline.config.load import TYPED

        pairs, given = split_overrides(given, TYPED)
        overrides, sections = [f"--{key}={text}" for key, text in pairs], TYPED
    parser = make_parser(sections)
    parser.given = given if sections else []
    chosen = parser.parse_args(given)
    if chosen.command in RUNS and chosen.command != "explain":
        from hookline.cli.runs import run_stage

        return run_stage(chosen, [*overrides, "--trainer.trace=true"] if chosen.trace else overrides)
    if chosen.command in ("explain", "trace", "replay"):
        from hookline.cli import plans

        if chosen.command == "explain":
            return plans.explain_run(chosen, overrides)
        return plans.describe_traces(chosen) if chosen.command == "trace" else plans.replay_run(chosen)
    if chosen.command in ("run", "convert"):
        from hookline.cli import scripts

        return scripts.run_program(chosen) if chosen.command == "run" else scripts.convert_config(chosen)
    if chosen.command == "checkpoint":
        if chosen.action in ("export", "import"):
            from hookline.cli import exports

            return exports.export_run(chosen) if chosen.action == "export" else exports.import_weights(chosen)
        from hookline.cli.checkpoints import show_checkpoints, verify_checkpoints

        return show_checkpoints(chosen) if chosen.action == "show" else verify_checkpoints(chosen)
    if chosen.command in OF_RUNS:
        return _inspect(chosen)
    if chosen.command in ("watch", "control"):
        from hookline.cli import live

        return live.serve_page(chosen) if chosen.command == "watch" else live.send_command(chosen)
    if chosen.command == "mcp":
        from hookline.cli.mcp_server import serve

        return serve(chosen)
    if chosen.command == "new":
        from hookline.cli.scaffold import write_project

        wrote = "\n".join(f"wrote {path}" for path in write_project(chosen.directory))
        print(f"{wrote}\n\nNext: cd {chosen.directory} && hookline fit run.toml")
        print("Its tests: pip install pytest && python -m pytest")
        return OK
    from hookline.cli.lists import list_parts

    return list_parts(chosen)


OF_RUNS = ("runs", "summary", "report", "samples", "rewind", "diverge")


def _inspect(chosen: argparse.Namespace) -> int:
    """Answer a question about recorded runs."""
    if chosen.command == "samples":
        from hookline.cli.samples import print_samples

        return print_samples(chosen)
    if chosen.command == "rewind":
        from hookline.cli.rewind import rewind_run

        return rewind_run(chosen)
    if chosen.command == "diverge":
        from hookline.cli.diverge import print_divergence

        return print_divergence(chosen)
    from hookline.cli.summaries import print_report, print_runs, print_summary

    views = {"runs": print_runs, "summary": print_summary, "report": print_report}
    return views[chosen.command](chosen)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say where a key of the configuration belongs."""

    given: Sequence[str] = ()
    """The arguments of a command that reads a configuration."""

    def error(self, message: str) -> Any:
        """Report an error as argparse does, with the hint."""
        if wrong := re.search("invalid choice: '(.*?)' .choose from (.*)", message):
            message += closest(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        if unknown := message.partition("unrecognized arguments: ")[2].split():
            from hookline.config.files import keys_named
            from hookline.config.sections import option_names

            name = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
            if name in option_names():
                message += f"\nThis is an option of the trainer: --trainer.{name}"
            elif "." in name and "=" in unknown[0]:
                message += f"\nA key of the configuration begins with two dashes: --{unknown[0].lstrip('-')}"
            elif self.given and unknown[0].startswith("--"):
                keys = keys_named(name, self.given) or [f"module.{name}"]
                message += (
                    f"\nA key of the configuration is written with its section: --{' or --'.join(keys)}"
                )
        on_one_rank(message, lambda: argparse.ArgumentParser.error(self, message))
        sys.exit(USAGE)


def make_parser(sections: Mapping[str, str]) -> _Parser:
    """Return a parser with all commands and their options.

    sections: those of a configuration that a run command sets, for its help; `split_overrides` reads them.
    """
    parser = _Parser(
        "hookline",
        description="Train PyTorch models with every moment of the training open to hooks.",
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hookline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, doc: str, epilog: str = "", group: Any = commands, json: bool = True, usage: Any = None
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = group.add_parser(
            name,
            help=doc,
            description=f"{doc[0].upper()}{doc[1:]}.",
            epilog=epilog or CODES,
            usage=usage,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if json:
            added.add_argument(
                "--json", action="store_true", help="for programs: one JSON document on stdout"
            )
        return added

    _add_run_commands(command, sections)
    _add_foreign_commands(command)
    _add_list_commands(command)
    _add_result_commands(command)
    _add_live_commands(command)
    _add_assistant_command(command)
    _add_trace_commands(command)
    _add_rewind_command(command)
    _add_diverge_command(command)
    about = "describe checkpoints, verify them, export their weights, or import those of other tools"
    _add_checkpoint_commands(
        command,
        command("checkpoint", about, CHECKPOINT_CODES, json=False).add_subparsers(
            dest="action", required=True, metavar="COMMAND"
        ),
    )
    return parser


def _add_run_commands(command: Any, sections: Mapping[str, str]) -> None:
    for name, doc in RUNS.items():
        optional, file = ("?", "[CONFIG]") if name == "explain" else (None, "CONFIG")
        added = command(name, doc, usage=f"%(prog)s [OPTION ...] {file} [--SECTION.KEY VALUE ...]")
        added.add_argument("config", metavar="CONFIG", help="a .toml or .yaml file", nargs=optional)
        added.add_argument(
            "--allow",
            action="append",
            default=[],
            metavar="PACKAGE",
            help="also allow class paths of this package",
        )
        added.add_argument(
            "--hook", action="append", default=[], metavar="HOOK", help="add a hook, by name or class path"
        )
        if name == "explain":
            added.add_argument(
                "--stage", "--verb", dest="stage", choices=list(RUNS)[:-1], default="fit", help="what to show"
            )
            added.add_argument("--all", action="store_true", help="also show events without listeners")
            added.add_argument(
                "--from", dest="trace", metavar="TRACE", help="compare the recorded run with the plan"
            )
            added.add_argument(
                "--diff", nargs=2, metavar="CONFIG", help="list the differences between two configurations"
            )
        else:
            added.add_argument(
                "--trace", action="store_true", help="write trace.json, a timeline, into the run's directory"
            )
            added.add_argument(
                "--traceback", action="store_true", help="show the traceback of an error of Hookline"
            )
        if name == "fit":
            added.add_argument(
                "--fresh", action="store_true", help="start a new run, even if run_dir has checkpoints"
            )
        keys = added.add_argument_group("configuration")
        for key, about in {"SECTION.KEY": OVERRIDES, **sections}.items():
            keys.add_argument(f"--{key}", metavar="VALUE", help=about)


def _add_list_commands(command: Any) -> None:
    one = {"nargs": "?", "metavar": "NAME", "help": "describe only this one"}
    command("hooks", "list the available hooks, or describe one").add_argument("name", **one)
    command("events", "list the events of a run, or describe one").add_argument("name", **one)
    command("schema", "print the JSON schema of a configuration, for editors")
    about = "write a small project: a module, a hook, a configuration, a test for the hook"
    command("new", about).add_argument("directory", metavar="DIR", help="the directory to make")


def _add_result_commands(command: Any) -> None:
    added = command(
        "runs", "list the runs in a directory: status, step, best metric, age and size", RUNS_CODES
    )
    added.add_argument(
        "directory", metavar="DIR", nargs="?", help="by default runs/, or this directory if there is none"
    )
    added = command(
        "summary", "print how a run ended, its metrics and its cost, or compare several runs", SUMMARY_CODES
    )
    added.add_argument("run_dirs", metavar="RUN", nargs="+", help="a run's directory, or its name in runs/")
    added = command(
        "report", "write a page about a run, or several side by side, as one HTML file", REPORT_CODES
    )
    added.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", help="a run's directory; the run may still be running"
    )
    added.add_argument(
        "--out", metavar="FILE", help="FILE.html; by default report.html in RUN_DIR, of several runs here"
    )
    added.add_argument(
        "--against", metavar="RUN", help="mark where the runs diverge from this one, by their digests"
    )

    added = command("samples", "print the samples behind a step of a run", SAMPLES_CODES)
    added.add_argument("run_dir", metavar="RUN", help="a run's directory, or its name in runs/")
    added.add_argument(
        "--step",
        metavar="N",
        help="a step as in the log, or several: 100-120; last step + 1: an update that was not made",
    )
    added.add_argument("--epoch", metavar="E", help="with --batch, instead of --step: an epoch, from 0 on")
    added.add_argument("--batch", metavar="B", help="a batch of this epoch, from 0 on, or several: 10-13")
    added.add_argument("--plain", action="store_true", help="one sample on each line, for ExcludeSamples")


def _add_foreign_commands(command: Any) -> None:
    added = command("run", "run a program written for another trainer, unchanged", RUN_CODES, json=False)
    added.add_argument(
        "--as",
        dest="replace",
        action="append",
        default=[],
        choices=SYSTEMS,
        metavar="NAME",
        help=f"replace this package even if it is installed: {', '.join(SYSTEMS)}",
    )
    added.add_argument("-m", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    added.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    added.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")
    added = command("convert", "write a configuration of Hookline for one of LightningCLI", CONVERT_CODES)
    added.add_argument("config", metavar="CONFIG", help="a .yaml file of LightningCLI")
    added.add_argument("out", metavar="OUT", nargs="?", help="a .yaml file; by default CONFIG.hookline.yaml")
    added.add_argument("--module", default="", metavar="PATH", help="the class path of the model")
    added.add_argument("--datamodule", default="", metavar="PATH", help="the class path of the data module")
    added.add_argument(
        "--allow", action="append", default=[], metavar="PACKAGE", help="also check classes of this package"
    )
    added.add_argument("--force", action="store_true", help="replace OUT if it exists")


def _add_live_commands(command: Any) -> None:
    added = command("watch", "serve a live page about a run, on this machine only", WATCH_CODES)
    added.add_argument("run_dir", metavar="RUN_DIR", help="a run's directory; the run may have ended")
    added.add_argument("--port", type=int, default=0, metavar="N", help="by default any free port")
    added = command(
        "control",
        "tell a running job to switch a hook, validate, change the learning rate, save or stop",
        CONTROL_CODES,
    )
    added.add_argument("run_dir", metavar="RUN_DIR", help="the directory that the job writes into")
    added.add_argument("action", metavar="ACTION", nargs="?", default="status", help="see below")
    added.add_argument("words", metavar="...", nargs="*", help="the arguments of the action")
    added.add_argument("--name", metavar="NAME", help="the name of an attached hook")
    added.add_argument(
        "--group", metavar="N", help="lr: only this parameter group, by its number from 0 or its name"
    )
    added.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="how long to wait for the result"
    )


def _add_assistant_command(command: Any) -> None:
    added = command(
        "mcp", "serve runs to an assistant by MCP, on standard input and output", MCP_CODES, json=False
    )
    added.add_argument(
        "directory", metavar="DIR", nargs="?", help="by default runs/, or this directory if there is none"
    )
    added.add_argument("--control", action="store_true", help="also tools that change a running job")
    added.add_argument("--code", metavar="DIR", help="also tools that run code, from files below DIR only")


def _add_trace_commands(command: Any) -> None:
    added = command("trace", "describe traces, or merge those of several ranks", TRACE_CODES)
    added.add_argument("traces", metavar="TRACE", nargs="+", help="a file that a run with --trace wrote")
    added.add_argument("--out", metavar="FILE", help="merge them into this file, on one clock")
    added = command("replay", "replay a recorded run to a hook, without a model", TRACE_CODES)
    added.add_argument("trace", metavar="TRACE", help="a file that a run with --trace wrote")
    added.add_argument("hook", metavar="HOOK", help="a name or a class path: my_hooks:MyHook")
    added.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a hook argument")
    added.add_argument("--rank", type=int, metavar="N", help="of a trace with several ranks")


def _add_diverge_command(command: Any) -> None:
    added = command(
        "diverge", "find the first step at which two runs differ, and what differs", DIVERGE_CODES
    )
    added.add_argument("run", metavar="A", help="a run's directory, or its name in runs/")
    added.add_argument("other", metavar="B", nargs="?", help="another run; without it, A and its own resumes")
    added.add_argument(
        "--resume", action="store_true", help="compare A with its own resumes; the default of one run"
    )
    added.add_argument("--ranks", action="store_true", help="compare the ranks of A with each other")
    added.add_argument(
        "--no-rerun", action="store_true", help="only read; do not run A and B again to narrow the step"
    )
    added.add_argument(
        "--config",
        action="append",
        metavar="CONFIG",
        help="the configuration of both runs; twice: of A, then of B",
    )
    added.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="to run again: also allow class paths of this package",
    )


def _add_rewind_command(command: Any) -> None:
    added = command("rewind", "run a recorded run again to a step, with probes attached", REWIND_CODES)
    added.add_argument("run_dir", metavar="RUN", help="a run's directory, or its name in runs/")
    added.add_argument("--to", type=int, required=True, metavar="N", help="the last update to make")
    added.add_argument(
        "--with",
        dest="probes",
        action="append",
        default=[],
        metavar="FILE.py:CLASS",
        help="attach a hook from a file; it may only observe",
    )
    added.add_argument(
        "--prompt",
        action="store_true",
        help="open a Python prompt at step N: model, batch, optimizer, trainer",
    )
    added.add_argument("--out", metavar="DIR", help="keep what the run writes; by default it is removed")
    added.add_argument(
        "--without", action="append", default=[], metavar="HOOK", help="also leave out this hook of the run"
    )
    added.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="do not compare metrics of this name, such as 'time/*'",
    )
    added.add_argument("--config", metavar="CONFIG", help="the configuration; by default that of run.json")
    added.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="also allow class paths of this package",
    )


def _add_checkpoint_commands(command: Any, group: Any) -> None:
    added = command("show", "describe a checkpoint, or list those of a run", CHECKPOINT_CODES, group)
    added.add_argument("path", metavar="PATH", help="see below")
    added.add_argument(
        "--tensors", action="store_true", help="also list every weight with its type and shape"
    )
    command(
        "verify", "read every file of a checkpoint, or of all those of a run", CHECKPOINT_CODES, group
    ).add_argument("paths", metavar="PATH", nargs="+", help="see below")
    _add_export_commands(command, group)


def _add_export_commands(command: Any, group: Any) -> None:
    added = command("export", "write the weights or the module, for other tools", EXPORT_CODES, group)
    added.add_argument("path", metavar="PATH", help="a checkpoint, or the directory of a run")
    added.add_argument("out", metavar="OUT", help="the file or folder to write")
    added.add_argument("--checkpoint", choices=("auto", "best"), help="of a run: its newest (auto) or best")
    added.add_argument("--format", metavar="FORMAT", help="see below; by default, the ending of OUT decides")
    added.add_argument(
        "--weights",
        metavar="KIND",
        default="scored",
        help="where a hook averages: scored (as evaluations used them, the default), raw or averaged",
    )
    added.add_argument(
        "--hook", metavar="NAME", help="the weights that this hook keeps, such as weight_averaging"
    )
    prefix = "only weights whose names start with PREFIX, without it, such as model."
    added.add_argument("--prefix", metavar="PREFIX", help=prefix)
    added.add_argument(
        "--shard-size", metavar="SIZE", help="hf-sharded: size limit of a file, such as 500MB; by default 5GB"
    )
    added.add_argument("--config", metavar="CONFIG", help="onnx, torch-export: the configuration of the run")
    added.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="onnx, torch-export: also allow class paths of this package",
    )
    added.add_argument(
        "--method",
        default="forward",
        metavar="NAME",
        help="onnx, torch-export: the method to export, forward (the default) or predict_step",
    )
    added.add_argument(
        "--dynamic-batch", action="store_true", help="onnx, torch-export: accept batches of any size"
    )
    added.add_argument(
        "--force", action="store_true", help="replace OUT: a file, or a folder that an export has written"
    )
    added = command("import", "write a checkpoint with the weights of another tool", IMPORT_CODES, group)
    added.add_argument("source", metavar="SOURCE", help="a file or a folder of another tool")
    added.add_argument("out", metavar="OUT", help="the directory of the new checkpoint")
    added.add_argument("--key", metavar="KEY", help="the key of the weights in a torch file, such as ema")
    added.add_argument("--prefix", metavar="PREFIX", help=prefix)
    added.add_argument("--force", action="store_true", help="replace OUT if it is a checkpoint")
