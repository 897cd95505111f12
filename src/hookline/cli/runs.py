"""`fit`, `validate`, `test` and `predict`: run a configuration and print the result."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from hookline.cli.output import FAILED, INTERRUPTED, OK
from hookline.config import Parts, load_config
from hookline.config.problems import ConfigError, Override, has_secret
from hookline.engine.hook import Hook
from hookline.util.errors import Preempted
from hookline.util.urls import shown


def run_stage(chosen: argparse.Namespace, overrides: list[str]) -> int:
    """Run one stage."""
    if chosen.command == "fit" and chosen.fresh:
        if any(each.startswith("--checkpoint=") for each in overrides):
            raise ConfigError(
                "--fresh begins a new run and --checkpoint continues one: leave one out.",
                where="command line",
            )
        overrides = [*overrides, "--checkpoint=false"]
    parts = load_config(chosen.config, overrides, allow=chosen.allow, hooks=chosen.hook).build()
    from hookline.training.trainer import Trainer

    trainer = parts.make_trainer(Trainer)
    saved = SavedPath()
    trainer.add_hook(saved)
    trainer.shows_model = False  # printed last here, after the result of the command
    # output of hooks and modules must not mix with the JSON document
    redirect = contextlib.redirect_stdout(sys.stderr) if chosen.json else contextlib.nullcontext()
    predictions, code = None, OK
    try:
        with redirect:
            predictions = _execute_stage(chosen.command, trainer, parts)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Preempted as ended:
        code = int(ended.code or FAILED)
    except BaseException as error:
        from hookline.reliability.summary import PRUNED

        if trainer.status != "pruned" or type(error).__name__ != PRUNED:
            _add_resume_command(error, chosen, overrides, trainer)
            raise
    written = [
        getattr(each, "folder", None) for each in trainer.hooks if getattr(each, "writes_predictions", False)
    ]
    if predictions is not None and any(written):
        predictions, saved.predictions = None, written[0]
    if not trainer.strategy.ranks.alone and predictions is not None:
        predictions = _gather_predictions(predictions, trainer.strategy.ranks)
    if trainer.strategy.rank == 0:
        _print_result(chosen, overrides, trainer, saved, predictions, interrupted=code != OK)
    return code


def _gather_predictions(predictions: list[Any], ranks: Any) -> list[Any]:
    """Return the predictions of all ranks in the order of the data: the batches are dealt to ranks in
    turn.
    """
    from hookline.loggers.jsonl import jsonable

    missing = object()  # the last batches of a rank that has fewer
    of_all = ranks.gather(jsonable(predictions))
    turns = itertools.zip_longest(*(of_all[rank] for rank in ranks.readers), fillvalue=missing)
    return [batch for turn in turns for batch in turn if batch is not missing]


def _execute_stage(stage: str, trainer: Any, parts: Parts) -> Any:
    if stage == "fit":
        # a named directory means this run, so it continues there
        resume = (
            "auto"
            if parts.checkpoint is None and trainer.options.run_dir is not None
            else parts.checkpoint or None
        )
        trainer.fit(parts.module, datamodule=parts.datamodule, resume=resume, **parts.fit_arguments)
        return None
    checkpoint = parts.checkpoint or None
    if parts.checkpoint is None and trainer.strategy.rank == 0:
        _warn_untrained(stage, trainer.options.run_dir)
    if stage == "predict":
        return trainer.predict(parts.module, datamodule=parts.datamodule, checkpoint=checkpoint)
    functions = {name: each for name, each in parts.fit_arguments.items() if name in ("loss", "step")}
    measure = trainer.validate if stage == "validate" else trainer.test
    measure(parts.module, datamodule=parts.datamodule, checkpoint=checkpoint, **functions)
    return None


def _warn_untrained(stage: str, run_dir: Any) -> None:
    """Warn that a stage uses the initial weights, although the directory of the run has checkpoints."""
    from hookline.checkpoint.catalog import find_checkpoints

    if run_dir is not None and find_checkpoints(Path(run_dir))[0]:
        print(
            f"WARNING: {stage} uses the initial weights of the module, although {run_dir} has checkpoints "
            "of this run. For trained weights pass --checkpoint best, --checkpoint auto (the newest one) or "
            "--checkpoint PATH. For the initial weights, without this warning: --checkpoint false.",
            file=sys.stderr,
        )


class SavedPath(Hook):
    """Remembers the newest checkpoint, for the command that continues the run."""

    name = "cli_saved_path"
    tier = "builtin"
    is_internal = True
    path: Path | None = None
    predictions: Path | None = None
    """The folder that a hook has written the predictions to."""

    def on_checkpoint_save(self, path: Path) -> None:
        """Remember the path."""
        self.path = path


def _print_result(
    chosen: argparse.Namespace,
    overrides: list[str],
    trainer: Any,
    saved: SavedPath,
    predictions: Any,
    interrupted: bool,
) -> None:
    state = trainer.state
    result: dict[str, Any] = {
        "command": chosen.command,
        "status": trainer.status,
        "step": trainer.global_step,
        "epochs": state.epochs_seen,
        "metrics": {name: float(value) for name, value in trainer.metrics.items()},
        **_newest_on_disk(chosen, trainer, saved),
    }
    if predictions is not None:
        result["predictions"] = str(_write_predictions(predictions, trainer.run_dir / "predictions.jsonl"))
    elif saved.predictions is not None:
        result["predictions"] = str(saved.predictions)
    if trainer.loggers or saved.path is not None or "predictions" in result:
        result["run_dir"] = str(trainer.run_dir)
    if chosen.json:
        from hookline.loggers.jsonl import jsonable

        print(json.dumps(jsonable(result)))
        return
    reason = f" ({state.stop_reason})" if state.stop_reason else ""
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
    at = state.progress if chosen.command == "fit" else f"step {result['step']:,}"
    print(f"{chosen.command} {result['status']}{reason} at {at}{': ' if numbers else ''}{numbers}")
    line = _model_line(trainer) if chosen.command == "fit" else ""  # it has the checkpoint
    shown_parts = {
        "predictions": result.get("predictions"),
        "checkpoint": "" if line else _checkpoint_text(result),
        "run directory": result.get("run_dir"),
    }
    for what, text in shown_parts.items():
        if text:
            print(f"{what}: {text}")
    if interrupted and saved.path is not None:
        again = _resume_command(chosen, overrides, trainer, saved.path)
        print(f"To continue{_to_fill_in(again)}: {again}")
    if line:
        print(line)


def _model_line(trainer: Any) -> str:
    from hookline.reliability.model_location import model_line

    return model_line(trainer._fitted) if trainer._fitted is not None else ""


def _newest_on_disk(chosen: argparse.Namespace, trainer: Any, saved: SavedPath) -> dict[str, Any]:
    """Return the newest checkpoint of a fit, its step, and whether it has the last state of the fit; of an
    evaluation the checkpoint whose weights it used.
    """
    if chosen.command != "fit":
        used = None if trainer._last is None else trainer._last.resume.path
        return {"checkpoint": None if used is None else shown(used)}
    run = trainer._fitted
    if run is None:
        return {"checkpoint": None}
    path = saved.path or run.resume.path
    if path is None or run.saves.on_disk is None:
        return {"checkpoint": None, "checkpoint_step": None, "last_state_saved": False}
    return {
        "checkpoint": shown(path),
        "checkpoint_step": run.saves.on_disk[0],
        "last_state_saved": run.saves.is_final or run.saves.on_disk == run.stamp,
    }


def _checkpoint_text(result: dict[str, Any]) -> str:
    """Return the checkpoint that an evaluation used, or what a fit has saved."""
    if result["command"] != "fit":
        return result["checkpoint"] or ""
    if result["checkpoint"] is None:
        return "none; nothing of this run is saved"
    missing = (
        "" if result["last_state_saved"] else f"; the last state, of step {result['step']}, is not saved"
    )
    return f"{result['checkpoint']} (step {result['checkpoint_step']}){missing}"


def _resume_command(
    chosen: argparse.Namespace, overrides: list[str], trainer: Any, path: Path | str | None
) -> str:
    """Return the command that continues from a checkpoint."""
    again = []
    for override in overrides:
        key, _, text = override.removeprefix("--").partition("=")
        if key != "checkpoint":
            again.append(f"--{key}=..." if has_secret(key, Override(text)) else override)
    allowed = [word for each in chosen.allow or () for word in ("--allow", str(each))]
    hooks = [word for each in chosen.hook or () for word in ("--hook", str(each))]
    # a run with a run_dir finds its newest checkpoint itself
    where = [] if trainer.options.run_dir is not None else ["--checkpoint", str(path)]
    words = [
        *_launcher(trainer.strategy.world_size),
        "fit",
        str(chosen.config),
        *allowed,
        *hooks,
        *again,
        *where,
    ]
    return shlex.join(map(shown, words))


def _to_fill_in(command: str) -> str:
    """Return a hint to fill in values of the command that look like secrets and are hidden."""
    hidden = [word.removesuffix("=...") for word in shlex.split(command) if word.endswith("=...")]
    return (
        f" (fill in the hidden {'value' if len(hidden) == 1 else 'values'} of {', '.join(hidden)})"
        if hidden
        else ""
    )


def _launcher(world_size: int) -> list[str]:
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in os.environ and here == str(world_size):
        return ["torchrun", "--standalone", "--nproc-per-node", here, "-m", "hookline"]
    return ["hookline"]  # one process, or an unknown launcher of several machines


def _add_resume_command(
    error: BaseException, chosen: argparse.Namespace, overrides: list[str], trainer: Any
) -> None:
    """Replace the call in the last note of a failed run by a command."""
    from hookline.reliability.summary import end_summary

    if (ending := end_summary(error)) is None:
        return
    again = _resume_command(chosen, overrides, trainer, ending.saved)
    if not isinstance(error, SystemExit):
        notes = error.__notes__
        notes[notes.index(ending.note())] = ending.note(again)
    elif ending.saved:  # a hook called sys.exit, and the note is on the terminal already
        print(f"Or: {again}", file=sys.stderr)


def _write_predictions(predictions: Any, path: Path) -> Path:
    """Write one line per batch, or per batch of each loader."""
    from hookline.loggers.jsonl import jsonable

    with path.open("w", encoding="utf-8") as file:
        for batch in predictions:
            file.write(json.dumps(jsonable(batch), allow_nan=False) + "\n")
    return path
