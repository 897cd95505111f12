"""The settings of recorded runs: their names and values, and those that differ between runs."""

from __future__ import annotations

import json
from typing import Any

from hookline.report.reader import RecordedRun
from hookline.util.text import cut, flatten, format_number, mask

PLACES = ("run_dir", "default_root_dir", "trace", "digest")
"""Options that usually differ between runs and do not affect training."""
LOGGED = ("options", "module", "device", "precision", "strategy", "hooks", "torch", "hookline")
"""Hyper-parameters that every log has; the others are the module's."""


NOT_CHOSEN = ("ProgressBar", "ModelSummary", "KeptHParams")
"""Endings of classes of hooks that trainers add themselves, and that do not affect training."""


def recorded_settings(run: RecordedRun) -> dict[str, Any]:
    """Return every setting by its name, the ones that users set first: configuration, module, trainer, hooks,
    optimizers.
    """
    record, logged = run.record, run.params
    options = record.get("options") or logged.get("options") or {}
    module, machine = record.get("module"), record.get("machine")
    hparams = module.get("hparams") if isinstance(module, dict) else None
    rest = record.get("settings")
    known: dict[str, Any] = {
        "config": record.get("config"),
        "module": hparams,
        "data": record.get("data"),
        "trainer": options,
        "hooks": _hooks(record.get("hooks")),
        "": {key: each for key, each in rest.items() if key not in options}
        if isinstance(rest, dict)
        else None,
        "module.class": module.get("class") if isinstance(module, dict) else logged.get("module"),
        "git": _commit(record.get("git")),
        "versions": record.get("versions"),
        "machine": {key: machine.get(key) for key in ("world_size", "device", "device_name")}
        if isinstance(machine, dict)
        else None,
        # what HParams has logged
        "logged": None if hparams else {key: each for key, each in logged.items() if key not in LOGGED},
    }
    # A log of an older version may have secrets. The data section has only numbers, and a loader may be
    # called "tokens".
    flat = flatten(
        {name: value if name == "data" else mask(value) for name, value in known.items() if value is not None}
    )
    flat = {key.removeprefix("."): value for key, value in flat.items() if value != {}}
    twice = {f"config.{key}" for key in flat} | {
        f"config.{key}_path" for key in flat if key.endswith(".class")
    }
    # a resumed run uses the learning rate of its checkpoint, not that of its configuration
    flat |= {
        key: flat[used]
        for key in flat
        if key.startswith("config.optimizer.")
        and (used := f"optimizers.0.groups.0.{key.rpartition('.')[2]}") in flat
    }
    return {
        key: value for key, value in flat.items() if key.rpartition(".")[2] not in PLACES and key not in twice
    }


def _hooks(hooks: Any) -> dict[str, Any] | None:
    if not isinstance(hooks, dict):
        return None
    about = {
        name: each
        for name, each in hooks.items()
        if isinstance(each, dict)
        and not str(each.get("class")).startswith("hookline.cli.")
        and not str(each.get("class")).endswith(NOT_CHOSEN)
    }
    off = {name: {"enabled": False} for name, each in about.items() if each.get("enabled") is False}
    params = {name: each["params"] for name, each in about.items() if isinstance(each.get("params"), dict)}
    return {
        name: {"class": each.get("class"), **off.get(name, {}), **params.get(name, {})}
        for name, each in about.items()
    }


def _commit(git: Any) -> str | None:
    if not isinstance(git, dict) or not isinstance(git.get("commit"), str):
        return None
    return f"{git['commit'][:12]}{' with changes' if git.get('dirty') else ''}"


def differences(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that differ between runs, with the value in each; None where a run does not have
    it. Those of which runs have different values come first.

    A run that failed before its loaders and optimizers were known does not differ in their settings. A
    setting that appears under several names (in the configuration and in the optimizer) is listed under the
    first. The number of batches of a loader is left out if another setting of that loader differs, because it
    follows from that.
    """
    keys = dict.fromkeys(key for each in settings for key in each)
    sections = [{"hooks", *(key.partition(".")[0] for key in each)} for each in settings]  # it may have none
    spelled = {
        key: [
            json.dumps(each.get(key), sort_keys=True) if key.partition(".")[0] in known else ""
            for each, known in zip(settings, sections, strict=True)
        ]
        for key in keys
    }
    differing = [key for key in keys if len({*spelled[key]} - {""}) > 1]
    loaders = {
        key.rpartition(".")[0]
        for key in differing
        if key.startswith("data.") and not key.endswith(".batches")
    }
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for key in sorted(differing, key=lambda key: not _has_two_values(key, settings)):
        parent, _, name = key.rpartition(".")
        if not (name == "batches" and parent in loaders) and not _belongs_to_missing_hook(key, settings):
            values = [each.get(key) for each in settings]
            found.setdefault((name, "\n".join(spelled[key])), {"key": key, "values": values})
    return list(found.values())


def _has_two_values(key: str, settings: list[dict[str, Any]]) -> bool:
    return len({json.dumps(each[key], sort_keys=True) for each in settings if key in each}) > 1


def _belongs_to_missing_hook(key: str, settings: list[dict[str, Any]]) -> bool:
    """Return whether this is a parameter of a hook that some of the runs do not have. The missing hook is
    listed instead.
    """
    first, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    return (
        first == "hooks"
        and rest != f"{name}.class"
        and not all(f"hooks.{name}.class" in each for each in settings)
    )


def column_titles(keys: list[str]) -> list[str]:
    """Return the last part of every key, or as many parts as make it unique; for a hook's class, the hook's
    name.
    """
    keys = [key.removesuffix(".class") if key.startswith("hooks.") else key for key in keys]
    found = []
    for key in keys:
        parts = key.split(".")
        lengths = range(1, len(parts) + 1)
        alone = (
            n for n in lengths if sum(f".{each}".endswith("." + ".".join(parts[-n:])) for each in keys) == 1
        )
        found.append(".".join(parts[-next(alone, len(parts)) :]))
    return found


def format_column(key: str, values: list[Any]) -> list[str]:
    """Return the values of a setting for a table: short, or in full if different ones would look the same."""
    short = [format_setting(value, is_class=key.endswith(".class")) for value in values]
    full = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    if len(set(map(cut, short))) == len(set(full)):
        return short
    if len(set(map(cut, full))) == len(set(full)):
        return full
    # a table would cut these before they differ
    letters = enumerate(zip(*full, strict=False))
    start = max(0, next((at for at, each in letters if len(set(each)) > 1), 0) - 10)
    return [f"…{text[start:]}" if start else text for text in full]


def format_setting(value: Any, is_class: bool = False) -> str:
    """Return a value for a table. is_class: it is the path of a class, of which the name is shown."""
    if value is None:
        return "-"
    if is_class:
        return str(value).rpartition(".")[2]
    if isinstance(value, str):
        return value
    return format_number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
