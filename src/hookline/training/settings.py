"""The settings of a run, which its checkpoints keep, and what has changed in them when it resumes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hookline.run.optimizers import bare
from hookline.run.run import Run

log = logging.getLogger("hookline")

SettingValues = dict[str, Any]
"""Plain values by name: "optimizers.0.groups.0.lr"."""

COMPARED_OPTIONS = (
    "accumulate_grad_batches",
    "accumulate_by",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "nonfinite",
    "seed",
)
RESTORED = ("optimizers.", "schedulers.")
"""Settings that a checkpoint restores, whatever the new program sets."""
DERIVED = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Entries of parameter groups that are not settings, or that a scheduler sets."""
PROGRESS = ("last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "verbose")
"""Entries of schedulers that change as they advance."""
CHANGE_ADVICE = {
    "optimizers": "The checkpoint restores optimizers. To use new values, set them in on_checkpoint_load "
    "(optimizers[0].param_groups[0]['lr'] = ...), or start a new run with hookline.load_weights(module, "
    "path).",
    "schedulers": "The checkpoint restores schedulers. To use new values, set them in on_checkpoint_load "
    "(attributes of "
    "schedulers[0]), or start a new run with hookline.load_weights(module, path).",
    "precision": "Weights and optimizer state now have the types of the new precision.",
    "seed": "Random numbers and the order of samples continue from the checkpoint's seed.",
}
MOST_LINES = 30
_NONE = object()


def collect_settings(run: Run) -> SettingValues:
    """Return the present settings of a run, without limits such as max_epochs, which are often raised."""
    found = {name: getattr(run.options, name) for name in COMPARED_OPTIONS} | {
        "precision": run.strategy.precision.name
    }
    for index, optimizer in enumerate(run.state.optimizers):
        for number, group in enumerate(optimizer.param_groups):
            values = {**group, "lr": group.get("initial_lr", group.get("lr"))}
            found |= {
                f"optimizers.{index}.groups.{number}.{key}": each
                for key, each in values.items()
                if key not in DERIVED
            }
    for index, schedule in enumerate(run.schedules):
        found |= {
            f"schedule.{index}.{key}": getattr(schedule, key) for key in ("interval", "frequency", "monitor")
        }
        if callable(getattr(schedule.scheduler, "state_dict", None)):
            found |= {
                f"schedulers.{index}.{key}": each
                for key, each in _scheduler_entries(schedule.scheduler.state_dict())
            }
    found |= {f"module.{name}": value for name, value in module_settings(run.module).items()}
    plain = {name: _as_comparable(value) for name, value in found.items()}
    return {name: value for name, value in plain.items() if value is not _NONE}


def report_changes(run: Run, saved: Any) -> None:
    """Warn which settings differ from the checkpoint, and which value is used. Call it after the restore."""
    if not isinstance(saved, dict) or run.resume.finished:
        return
    now, used = run.identity.settings, collect_settings(run)
    lines: dict[str, int] = {}
    kept: set[str] = set()
    for name in now:
        was, new = _as_comparable(saved.get(name, _NONE)), now[name]
        if was is _NONE or was == new or (name == "seed" and new is None):
            continue
        is_restored = name.startswith(RESTORED)
        if is_restored or name == "seed":
            run.identity.settings[name] = was  # still in use, so the next resume compares with it
        taken = was if name == "seed" else used.get(name, new)
        if is_restored and taken == new:
            continue  # it was set after an earlier resume
        if taken != new or name == "precision":
            kept.add(name.partition(".")[0])
        line = (
            f"{_setting_label(name, run)}: {_short_repr(was)} in the checkpoint, {_short_repr(new)} now; "
            f"{_short_repr(taken)} is used"
        )
        lines[line] = lines.get(line, 0) + 1
    if not lines:
        return
    shown = [
        f"  {line}{f' (in {count} groups)' if count > 1 else ''}"
        for line, count in list(lines.items())[:MOST_LINES]
    ]
    shown += [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    text = "\n".join(
        [
            "Settings have changed since the checkpoint was made:",
            *shown,
            *(each for kind, each in CHANGE_ADVICE.items() if kind in kept),
        ]
    )
    if run.state.rank == 0:
        log.warning(text)
    run.state.logger.log_event("warning", {"step": run.state.step, "epoch": run.state.epoch, "message": text})


def module_settings(module: nn.Module) -> SettingValues:
    """Return the numbers, flags and strings of torch's layers, and the dropout rates of other modules.

    Layers that differ only by their number share one entry: `layers.*.drop.p`.
    """
    found: dict[str, list[Any]] = {}
    for path, submodule in module.named_modules():
        is_layer = any(
            kind.__module__.startswith("torch.nn.modules.")
            for kind in type(submodule).__mro__
            if not kind.__module__.endswith((".module", ".container"))
        )
        place = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        for name, value in vars(submodule).items():
            if name.startswith("_") or name in ("training", "inplace"):
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if (is_layer and isinstance(value, float | bool | str)) or (
                is_number and (name == "p" or "drop" in name)
            ):
                found.setdefault(f"{place}.{name}".lstrip("."), []).append(value)
    return {
        name: values[0] if all(each == values[0] for each in values) else values
        for name, values in found.items()
    }


def _scheduler_entries(state: Any) -> Iterator[tuple[str, Any]]:
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == "_schedulers" and isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                yield from ((f"{number}.{name}", each) for name, each in _scheduler_entries(inner))
        elif not key.startswith("_") and key not in PROGRESS:
            yield key, value


def _as_comparable(value: Any) -> Any:
    """Return a value in the types of JSON; `_NONE` if it cannot be compared, such as a tensor."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta":
        return value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        parts = {str(key): _as_comparable(each) for key, each in value.items()}
        return _NONE if any(each is _NONE for each in parts.values()) else parts
    if type(value) in (list, tuple):
        inside = [_as_comparable(each) for each in value]
        return _NONE if any(each is _NONE for each in inside) else inside
    return _NONE


def _setting_label(name: str, run: Run) -> str:
    """Return the name of a setting for a message, such as `lr of SGD`."""
    kind, _, rest = name.partition(".")
    if kind == "module":
        return f"{type(run.module).__name__}.{rest}"
    if kind not in ("optimizers", "schedulers", "schedule"):
        return name
    index, _, rest = rest.partition(".")
    owners = list(map(bare, run.state.optimizers)) if kind == "optimizers" else run.state.schedulers
    number = f" {index}" if len(owners) > 1 else ""
    if kind == "optimizers":
        rest = rest.split(".", 2)[-1]
    return f"{rest} of {type(owners[int(index)]).__name__}{number}"


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
