"""`hookline rewind`: run a recorded run again to a step, with probes attached."""

from __future__ import annotations

import argparse
import code
import contextlib
import io
import json
import os
import sys
from typing import Any

from hookline.cli.output import DIFFERENT, FAILED, OK
from hookline.control.commands import make_hook, read_hook_file
from hookline.loggers.jsonl import jsonable
from hookline.rewind.comparison import Comparison
from hookline.rewind.rerun import RunAgain, make_run_again
from hookline.run.lock import is_running
from hookline.run.state import count_noun
from hookline.util.errors import HookError, OptionError
from hookline.util.text import format_table, printable, printable_lines

MOST_ROWS = 40
"""The most rows of the table of logged values: the last ones."""
MOST_DIFFERENCES = 10


def rewind_run(chosen: argparse.Namespace) -> int:
    """Run a recorded run again to a step, and print what the probes saw."""
    world_size, rank = (
        int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"))
    )
    if chosen.prompt and (world_size > 1 or chosen.json):
        other = "--json" if chosen.json else "torchrun: the other ranks would wait for the prompt"
        raise OptionError(f"--prompt cannot be combined with {other}.")
    again = make_run_again(
        chosen.run_dir,
        chosen.to,
        config=chosen.config,
        allow=chosen.allow,
        without=chosen.without,
        ignore=chosen.ignore,
        out=chosen.out,
        probes=[_make_probe(each) for each in chosen.probes],
    )
    # output of hooks and modules must not mix with the JSON document; rank zero prints
    silent = contextlib.redirect_stdout(io.StringIO() if rank else sys.stderr)
    with silent if rank or chosen.json else contextlib.nullcontext(), again.paused(keeps_failure=True):
        found = again.compared()
        if not chosen.json and not rank:
            print(printable_lines(_result_text(again, found)))
        if chosen.prompt:
            open_prompt(again)
    if chosen.json and not rank:
        print(json.dumps(jsonable(_result_data(again, found))))
    if again.failure is not None:
        return FAILED
    return (
        DIFFERENT if again.trainer.ranks.from_zero(bool(found.differences)) and not again.may_differ else OK
    )


def _make_probe(asked: str) -> Any:
    try:
        return make_hook({**read_hook_file(asked, "--with"), "name": None})
    except HookError as error:
        text = str(error)
        raise OptionError(text if text.startswith("--with") else f"--with {asked!r}: {text}") from None


# ---- the result --------------------------------------------------------------------------------------------


def _result_data(again: RunAgain, found: Comparison) -> dict[str, Any]:
    start = again.beginning.start
    return {
        "run": str(again.recorded.path),
        "to": again.to,
        "step": again.trainer.global_step,
        "from": {"step": again.beginning.step, "checkpoint": None if start is None else str(start.path)},
        "logged": [{"step": step, "over": over, "metrics": row} for (step, over), row in found.new.items()],
        "compared": {"values": found.values, "steps": found.steps},
        "differences": [each.data() for each in found.differences],
        "may_differ": again.may_differ,
        "left_out": again.left_out,
        "detached": again.collector.detached,
        "unusable": again.beginning.unusable,
        "failure": None if again.failure is None else _failure_text(again.failure),
        "out": None if again.out is None else str(again.out),
    }


def _result_text(again: RunAgain, found: Comparison) -> str:
    made = again.trainer.global_step - again.beginning.step
    lines = [
        f"rewound {again.recorded.path} to step {again.trainer.global_step}: "
        f"{count_noun(made, 'update', 'updates')} from {again.described_beginning}"
    ]
    if is_running(again.recorded.path):
        lines.append("The recorded run is still running; it is not disturbed.")
    if again.failure is not None:
        lines.append(f"Step {again.to} fails{_as_recorded(again)}: {_failure_text(again.failure)}")
    lines += _logged_lines(found)
    lines += [f"{tag} at step {step}: {text}" for step, tag, text in again.collector.texts]
    lines += [
        f"The probe {name} was detached, because {why}." for name, why in again.collector.detached.items()
    ]
    lines += _compared_lines(again, found)
    if again.left_out:
        lines.append(
            "Left out: " + ", ".join(f"{name} ({why})" for name, why in again.left_out.items()) + "."
        )
    if again.out is not None:
        lines.append(f"Written: {again.out}")
    return "\n".join(lines)


def _failure_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _as_recorded(again: RunAgain) -> str:
    """Return ' as recorded' if the recorded run failed with the same type of error."""
    known = again.recorded.record.get("error")
    return (
        " as recorded"
        if isinstance(known, dict) and known.get("type") == type(again.failure).__name__
        else ""
    )


def _logged_lines(found: Comparison) -> list[str]:
    """Return a table of the values that the log does not have, a row per step. `--json` has all digits."""
    if not found.new:
        return []
    names = list(dict.fromkeys(name for row in found.new.values() for name in row))
    rows = [
        (
            f"{step}" if over in ("", "step") else f"{step} ({over})",
            *(_value(row.get(name)) for name in names),
        )
        for (step, over), row in found.new.items()
    ]
    cut = [f"... and {len(rows) - MOST_ROWS} rows before"] if len(rows) > MOST_ROWS else []
    return [
        "Logged, and not in the recorded log:",
        *cut,
        format_table([("step", *names), *rows[-MOST_ROWS:]]),
    ]


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else "" if value is None else str(value)


def _compared_lines(again: RunAgain, found: Comparison) -> list[str]:
    why = again.may_differ
    if not again.recorded.has_log:
        return ["Not compared: the recorded run has no log.jsonl."]
    if not found.values:
        return [
            "Not compared: the log has no values of these steps. Trainer(log_every_n_steps=...) logs more."
        ]
    span = (
        f"step {found.steps[0]}" if len(found.steps) == 1 else f"steps {found.steps[0]} to {found.steps[-1]}"
    )
    values = count_noun(found.values, "value", "values")
    if not found.differences:
        return [f"Compared with the log: {values} of {span}, equal to the bit."]
    listed = [f"  {each}" for each in found.differences[:MOST_DIFFERENCES]]
    more = len(found.differences) - len(listed)
    return [
        f"{'Different' if why else 'DIFFERENT'} from the log: {len(found.differences)} of {values}, {span}:",
        *listed,
        *([f"  and {more} more"] if more else []),
        *(
            [f"Bits may differ here: {printable('; '.join(why))}."]
            if why
            else [
                "The machine and the versions are those of the recorded run, so the values should be equal. "
                "Has the code or the data changed, or does an operator add in another order each time "
                "(Trainer(deterministic=True))?"
            ]
        ),
    ]


# ---- the prompt --------------------------------------------------------------------------------------------


def open_prompt(again: RunAgain) -> None:
    """Open a Python prompt in the paused run. Its end ends the run."""
    trainer = again.trainer
    names: dict[str, Any] = {
        "trainer": trainer,
        "model": trainer.model,
        "batch": trainer.state.batch,
        "optimizer": trainer.optimizers[0] if trainer.optimizers else None,
        "step": trainer.global_step,
    }
    if again.failure is not None:
        names["error"] = again.failure
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - the arrow keys work at the prompt
    banner = f"Paused at step {trainer.global_step}. Names: {', '.join(names)}. Ctrl-D ends."
    with contextlib.suppress(SystemExit):
        code.interact(banner, local=names, exitmsg="")
