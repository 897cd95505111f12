"""The last line of a run's output: where the model is saved and how to load it; and `load_best`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline.checkpoint.catalog import (
    EVERY_MONITOR,
    KeptBest,
    best_first,
    find_checkpoints,
    find_with_files,
    with_outside,
)
from hookline.engine.hook_list import Entry
from hookline.engine.init_arguments import init_arguments
from hookline.run.directory import LAST, LAST_STATE
from hookline.run.module import Module
from hookline.run.record import module_class, read_record
from hookline.run.run import Run
from hookline.util.errors import CheckpointError
from hookline.util.terminal import in_notebook, notice_file
from hookline.util.urls import is_url, shown

if TYPE_CHECKING:
    from hookline.checkpoint.weights import WeightsReport

log = logging.getLogger("hookline")


def model_line(run: Run) -> str:
    """Return one line that says where the model is and how to load it; empty if no save was requested."""
    where, how = _where_and_how(run)
    return f"{where}. {how}" if how else where


def _where_and_how(run: Run) -> tuple[str, str]:
    """Return where the model is, and how to load it if it is saved."""
    s, last = run.state, run.saves.last
    newest = (
        last.saved
        if last is not None and last.saved is not None and last.failed is None
        else run.saves.newest
    )
    path, progress = (
        (newest.path, newest.progress) if newest is not None else (run.resume.path, run.saves.on_disk)
    )
    if path is None:
        return _weights_alone(run) or (_not_saved(run), "")
    step = newest.step if newest is not None else progress[0] if progress is not None else s.step
    is_saved = run.saves.is_final or progress is None or progress == run.stamp
    text = f"Model: {_as_posix(path)} (step {step})"
    if not is_saved and progress is not None and progress[:2] == run.stamp[:2]:  # no batch since the save
        text = (
            f"Model: {_as_posix(path)} (the weights of step {step}; what followed the save, such as the end "
            "of the epoch, is not in it)"
        )
    elif not is_saved:
        text = (
            f"Model: the last state, of step {s.step}, is NOT saved. The newest checkpoint is "
            f"{_as_posix(path)} (step {step})"
        )
    chosen, which = _restored_path(run) or path, "it"
    if (best := best_checkpoint_of(run)) is not None and Path(best["path"]) != Path(path):
        text += f". Best: {_as_posix(best['path'])} ({best['name']} {best['score']:.4g}, step {best['step']})"
        if _has_ended(run):
            chosen, which = _restored_path(run) or best["path"], "the best"
    return text, f"Load {which}: {how_to_load(run.module, chosen, run.state.hooks)}"


def _weights_alone(run: Run) -> tuple[str, str] | None:
    """Return the same for files from which a run cannot resume, such as those of Lightning's
    `ModelCheckpoint(save_weights_only=True)`; None if there are none.
    """
    folder = run.directory.existing()
    found = find_with_files(folder, read_record(folder))[0] if folder is not None else []
    newest = next((each for each in found if each.run == run.identity.id), None)
    if newest is None:
        return None
    best = best_checkpoint_of(run)
    path, step = (newest.path, newest.manifest["step"]) if best is None else (best["path"], best["step"])
    score = "" if best is None else f"{best['name']} {best['score']:.4g}, "
    how = how_to_load(run.module, path, run.state.hooks)
    return f"Model: {_as_posix(path)} ({score}step {step})", f"Load it: {how}"


def _not_saved(run: Run) -> str:
    last = run.saves.last
    if last is not None and last.failed is not None:
        return f"Model: NOT saved. {last.failed.error}"
    is_off = not run.options.saving.last and not run.options.fast_dev_run
    return "Model: not saved, because of checkpoint=False." if is_off else ""


def _restored_path(run: Run) -> Path | str | None:
    """Return the checkpoint whose weights a hook has put back into the module at the end (`restore_best`)."""
    if not _has_ended(run):
        return None
    hooks = [each.hook for each in run.state.hooks.entries() if getattr(each.hook, "restore_best", False)]
    return next((each.best_model_path for each in hooks if each.best_model_path), None)


def _has_ended(run: Run) -> bool:
    """Return whether the run neither failed nor will be resumed."""
    return run.state.status not in ("error", "preempted", "interrupted")


def model_line_after_failure(run: Run) -> str:
    """Return the line for a run that failed; empty without `checkpoints/last`. It never raises."""
    last, resumed = run.saves.last, run.resume.path
    began_with_it = resumed is not None and Path(resumed).name in (LAST, LAST_STATE)
    if last is None or (last.saved is None and not began_with_it):
        return ""
    try:
        return model_line(run)
    except Exception:  # the error of the run is the one to show
        log.debug("The location of the model could not be determined.", exc_info=True)
        return ""


def show_model(run: Run) -> None:
    """Print `model_line`; without a progress bar, log it at level INFO. A notebook folds how to load it."""
    if run.stage != "fit" or run.state.rank or not run.trainer.shows_model:
        return
    where, how = _where_and_how(run)
    line = f"{where}. {how}" if how else where
    if line and not run.options.enable_progress_bar:
        log.info("%s", line)
    elif how and in_notebook():
        from hookline.util.notebook import preformatted, show_folded

        show_folded(where, preformatted(how), line)
    elif line:
        print(line, file=notice_file(), flush=True)


def how_to_load(module: nn.Module, path: Path | str, hooks: Any) -> str:
    """Return the code that loads this checkpoint in another process that starts in the same directory.

    It also makes the module if the checkpoint has its arguments and its class can be imported.
    """
    where, name = json.dumps(_as_posix(path), ensure_ascii=False), type(module).__name__
    if isinstance(module, Module) and _can_be_made(module, hooks) and (code := import_of(type(module))):
        return f"{code}; model = {name}.load_from_checkpoint({where})"
    is_file = not is_url(path) and Path(path).is_file()  # such as Lightning's .ckpt; ours are directories
    if is_file and getattr(module, "hparams", None):  # a LightningModule, whose file has its arguments
        return f"model = {name}.load_from_checkpoint({where})"
    return f"import hookline; hookline.load_weights(model, {where})  # model: {name}, made as before"


def import_of(cls: type) -> str:
    """Return the code that imports a class; empty if it cannot be imported (`__main__`, in a function)."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls.__module__ == "__main__" or file is None or getattr(module, cls.__qualname__, None) is not cls:
        return ""
    parts, source = cls.__module__.split("."), Path(file).absolute()
    inside = source.parent if source.stem == "__init__" else source.with_suffix("")
    if list(inside.parts[-len(parts) :]) != parts:  # loaded under another name than its file has
        return ""
    root = inside.parents[len(parts) - 1]
    code = f"from {cls.__module__} import {cls.__qualname__}"
    here, given = Path.cwd(), filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # where a new Python that starts in this directory searches
    if root in {here, *(Path(each).absolute() for each in given), *_installed_path()}:
        return code
    # other programs do not search the script's directory, so the code adds it
    folder = root.relative_to(here) if root.is_relative_to(here) else root
    return f"import sys; sys.path.insert(0, {json.dumps(folder.as_posix(), ensure_ascii=False)}); {code}"


@functools.cache
def _installed_path() -> frozenset[Path]:
    """Return the folders of installed packages, and those that their .pth files name."""
    installed = {
        Path(each)
        for each in (*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values())
    }
    known = {*installed}
    for file in (each for folder in installed for each in folder.glob("*.pth")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            known |= {
                file.parent / line.strip()
                for line in file.read_text(encoding="utf-8").splitlines()
                if line.strip() and not line.startswith(("import", "#"))
            }
    return frozenset(each.absolute() for each in known)


def _can_be_made(module: Module, hooks: Any) -> bool:
    """Return whether the checkpoint has every argument that the module was made with.

    The hook `HParams` may leave some out.
    """
    kept: Any = next((each.hook for each in hooks.entries() if type(each.hook).__name__ == "HParams"), None)
    made = init_arguments(module)
    known = kept.params if kept is not None else made.recorded if made is not None else {}
    left_out = kept.left_out if kept is not None else made.left_out if made is not None else {}
    needed = [
        each
        for each in list(inspect.signature(type(module).__init__).parameters.values())[1:]
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    changed = made is not None and any(name not in known for name in made.recorded)
    return not left_out and not changed and all(each.name in known for each in needed)


def _as_posix(path: Path | str) -> str:
    return shown(path) if is_url(path) else Path(path).as_posix()


# ---- the best ----------------------------------------------------------------------------------------------


def best_checkpoint_of(run: Run) -> dict[str, Any] | None:
    """Return the best checkpoint in the run's directory: path, step, and the metric's name and score."""
    return best_below(run.directory.existing(), run.identity.id, kept_best(run.state.hooks.entries()))


def kept_best(entries: Iterable[Entry]) -> KeptBest:
    """Return where hooks and callbacks keep their best checkpoints, as each of them knows it, and the metric
    and mode of each.
    """
    keeping = [each.given for each in entries if isinstance(_best_path(each.given), str)]
    monitored = [each for each in keeping if getattr(each, "monitor", "") is not None]
    pairs = [(getattr(each, "monitor", ""), getattr(each, "mode", "")) for each in monitored]
    return KeptBest(
        tuple(filter(None, map(_best_path, monitored))),
        tuple((name, mode) for name, mode in pairs if name and mode),
        tuple(url for each in monitored if (url := getattr(each, "url", ""))),
    )


def _best_path(hook: Any) -> Any:
    return getattr(hook, "best_model_path", None)


def best_below(
    folder: Path | None, run_id: str = "", kept: KeptBest = EVERY_MONITOR
) -> dict[str, Any] | None:
    """Return the best checkpoint below a folder and where hooks keep theirs.

    run_id: by default the run of the folder's record.
    """
    record = read_record(folder) if folder is not None else {}
    run_id = run_id or record.get("id", "")
    inside = find_with_files(folder, record)[0] if folder is not None else []
    own = [each for each in inside if not run_id or each.run == run_id]
    found = best_first(with_outside(own, kept.paths, folder), kept)
    if not found:
        return None
    manifest = found[0].manifest
    monitor = manifest["monitor"]
    return {
        "path": found[0].path,
        "step": manifest["step"],
        "name": monitor["name"],
        "score": float(monitor["score"]),
    }


def _best_of_earlier_run(folder: Path | None) -> str:
    """Return a sentence about the best checkpoint of an earlier run in a directory; empty without one."""
    found = best_first(find_checkpoints(folder)[0]) if folder is not None else []
    if not found:
        return ""
    path, monitor = _as_posix(found[0].path), found[0].manifest["monitor"]
    return (
        f"An earlier run in it has kept {path} ({monitor['name']} {float(monitor['score']):.4g}); to load "
        f"that one, call load_best(path={path!r}). "
    )


def newest_run(
    folders: list[Path], module: nn.Module, has_checkpoint: Callable[[Path], bool], call: str
) -> Path | None:
    """Return the newest run that has a checkpoint, without those of another class of module.

    If no run has one, it is the newest run. folders: the runs of a trainer, the newest first. call: names the
    caller in a warning about a newer run that is skipped, such as one that failed early; empty: no warning.
    """
    records = {each: read_record(each) for each in folders}
    own = [each for each in folders if module_class(records[each]) in ("", type(module).__name__)]
    found = next(filter(has_checkpoint, own), None)
    if call and found is not None and found != own[0]:
        log.warning(
            "%s: the newest run, %s (%s), has kept no such checkpoint. The one that is used is of an earlier "
            "run of this trainer, %s.",
            call,
            own[0],
            records[own[0]].get("status", "without a record"),
            found,
        )
    return found if found is not None else next(iter(own or folders), None)


def run_to_evaluate(run: Run, which: str | Path, kept: KeptBest) -> Path | None:
    """Return the run of this trainer in which an evaluation after a fit searches 'best' or 'auto'."""

    def has_checkpoint(folder: Path) -> bool:
        if which == "best":
            return best_below(folder, kept=kept) is not None
        return which != "auto" or bool(find_checkpoints(folder)[0])

    call = f"checkpoint={which!r}" if run.state.rank == 0 else ""
    return newest_run(run.directory.own_runs(), run.module, has_checkpoint, call)


def load_best(
    module: nn.Module, folders: list[Path], hooks: Any, path: str | Path | None = None
) -> WeightsReport:
    """Load the best weights by a monitored metric into a module, in place, and report their checkpoint.

    path: the checkpoint; by default the best one of the newest run that has one, or where a hook keeps its
    best, otherwise at the URL of a hook that keeps checkpoints there. folders: the directories of the runs,
    the newest first; a `run_dir` need not exist.
    """
    from hookline.checkpoint.weights import load_weights

    folder = next(iter(folders), None)
    if path is None:
        kept = kept_best(hooks.entries())
        existing = [each for each in folders if each.is_dir()]
        chosen = newest_run(
            existing, module, lambda each: best_below(each, kept=kept) is not None, "load_best()"
        )
        best = best_below(chosen, kept=kept)
        path = best["path"] if best is not None else kept.url
    if not path:
        where = (
            "because no run has begun and the trainer has no run_dir"
            if folder is None
            else f"below {folder}"
            if folder.is_dir()
            else f"because run_dir={folder.as_posix()!r} does not exist"
        )
        by = " or ".join(f"{name} with mode={mode!r}" for name, mode in kept_best(hooks.entries()).monitors)
        raise CheckpointError(
            f"load_best(): no monitor has kept a checkpoint{f' for {by}' if by else ''} {where}, and no hook "
            f"has one elsewhere. {_best_of_earlier_run(folder)}Train with hooks=[ModelCheckpoint(monitor="
            '"val/loss")], or pass the path of a checkpoint: load_best(path=...).'
        )
    report = load_weights(module, path)
    for entry in hooks.entries():
        if (replaced := getattr(entry.hook, "weights_replaced", None)) is not None:
            replaced(module)
    # a notebook shows the report as the value of the cell
    log.log(logging.INFO if in_notebook() else logging.WARNING, "The best weights are loaded: %s", report)
    return report
