"""How a run was started, for its record: command line, commit, packages, machine and settings, no secrets."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hookline._version import __version__
from hookline.data.loaders import Loader
from hookline.data.sources import length_of
from hookline.engine.filters import FilterSettings
from hookline.engine.init_arguments import InitArguments, cannot_keep, init_arguments
from hookline.run.run import Run
from hookline.util.text import command_line, kind_of, mask, mask_text, printable

log = logging.getLogger("hookline")
GIT_SECONDS = 2.0
"""The time limit of each call of git."""
RECORDED_PACKAGES = {
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "einops": "einops",
    "flash_attn": "flash-attn",
    "fsspec": "fsspec",
    "jsonargparse": "jsonargparse",
    "keras": "keras",
    "lightning": "lightning",
    "mlflow": "mlflow",
    "numpy": "numpy",
    "optuna": "optuna",
    "pandas": "pandas",
    "peft": "peft",
    "pytorch_lightning": "pytorch-lightning",
    "ray": "ray",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "sentencepiece": "sentencepiece",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "tensorboardX": "tensorboardX",
    "timm": "timm",
    "tokenizers": "tokenizers",
    "torchao": "torchao",
    "torchaudio": "torchaudio",
    "torchdata": "torchdata",
    "torchmetrics": "torchmetrics",
    "torchvision": "torchvision",
    "trackio": "trackio",
    "transformers": "transformers",
    "triton": "triton",
    "wandb": "wandb",
    "xformers": "xformers",
}
"""Module -> package, for the versions to record. Python's own map of all packages takes 0.1 s to make."""


def provenance(run: Run) -> dict[str, Any]:
    """Return the fields of the run record about the start of the run."""
    return {
        "command": command_line(sys.orig_argv),
        "directory": mask_text(str(Path.cwd())),
        "git": code_state(),
        "versions": versions(),
        "machine": describe_machine(run),
        "config": mask(getattr(run.trainer, "resolved_config", None)),
        "options": mask(
            {
                each.name: getattr(run.options, each.name)
                for each in dataclasses.fields(run.options)
                if each.name not in getattr(run.traits.rules, "unrecorded_options", ())
            }
        ),
        "trainer": {
            "class": kind_of(type(run.state.shown_trainer)),
            "rules": None if run.trainer.rules is None else kind_of(type(run.trainer.rules)),
        },
        "module": {"class": kind_of(type(run.module)), "hparams": _module_parameters(run)},
        "hooks": {
            each.name: {
                "class": kind_of(each.given if inspect.isroutine(each.given) else type(each.given)),
                "enabled": each.enabled,
                "params": mask(hook_arguments(each.given)),
            }
            for each in run.state.hooks.entries()
            if not getattr(each.hook, "is_internal", False)
        },
    }


# ---- settings ----------------------------------------------------------------------------------------------


def _module_parameters(run: Run) -> Any:
    """Return the parameters of the hook HParams, else the module's constructor arguments."""
    for entry in run.state.hooks.entries():
        known = getattr(entry.hook, "params", None)
        if entry.name == "hparams" and isinstance(known, dict) and known:
            return mask(known)
    return mask(_constructor_arguments(run.module))


def _constructor_arguments(made: Any) -> dict[str, Any]:
    """Return an object's constructor arguments: as recorded, else its attributes of the same names."""
    recorded = init_arguments(made)
    return _argument_attributes(made) if recorded is None else {**recorded.recorded, **recorded.left_out}


def hook_arguments(hook: Any) -> dict[str, Any]:
    """Return a hook's constructor arguments; plain attributes of the same names have the present values."""
    made, own = init_arguments(hook) or InitArguments(), _argument_attributes(hook)
    present = {name: value for name, value in own.items() if not cannot_keep(value)}
    found = {**made.left_out, **own, **made.recorded, **present}
    return {name: str(each) if type(each) is FilterSettings else each for name, each in found.items()}


def _argument_attributes(made: Any) -> dict[str, Any]:
    """Return the attributes that have the name of a constructor argument.

    It does not call properties, because they are user code.
    """
    own = getattr(made, "__dict__", {})
    try:
        names = list(inspect.signature(type(made).__init__).parameters)[1:]
    except (TypeError, ValueError):
        return {}
    return {name: own[name] for name in names if name in own}


def data_settings(run: Run) -> dict[str, Any]:
    """Return the settings of the training and validation loaders; several loaders of a kind by name."""
    found: dict[str, Any] = {}
    for kind in ("train", "val"):
        loaders = run.data.loaders.get(kind, [])
        named = {mask_text(each.name, 200): _loader_settings(each) for each in loaders}
        if loaders:
            found[kind] = named[kind] if list(named) == [kind] else named
    return found


def _loader_settings(loader: Loader) -> dict[str, Any]:
    """Return the settings that determine a loader's batches. Without a DataLoader, only their number."""
    source, found = loader.source, dict[str, Any]()
    if isinstance(source, DataLoader):
        try:
            found = _dataloader_settings(source)
        except Exception:  # datasets and samplers are user code; an error there must not end the run
            log.debug("run.json has no settings of the loader %s", loader.name, exc_info=True)
    return {**found, "batches": loader.length}


def _dataloader_settings(source: DataLoader[Any]) -> dict[str, Any]:
    batches: Any = source.batch_sampler
    # with a custom batch sampler, torch does not use `source.sampler`
    is_own = batches is not None and type(batches) is not BatchSampler
    sampler: Any = batches if is_own else source.sampler
    size = source.batch_size if source.batch_size is not None else getattr(batches, "batch_size", None)
    drop_last = getattr(batches, "drop_last", None) if is_own else source.drop_last
    shuffle = {RandomSampler: True, SequentialSampler: False}.get(
        type(sampler), getattr(sampler, "shuffle", None)
    )
    is_plain = type(sampler) in (RandomSampler, SequentialSampler) or isinstance(
        source.dataset, IterableDataset
    )
    return {
        "batch_size": size if isinstance(size, int) else None,
        "shuffle": shuffle if isinstance(shuffle, bool) else None,
        "drop_last": drop_last if isinstance(drop_last, bool) else None,
        "num_workers": source.num_workers,
        "samples": length_of(source.dataset),
        **({} if is_plain else {"batch_sampler" if is_own else "sampler": kind_of(type(sampler))}),
    }


# ---- versions and machine ----------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions of Python, Hookline, torch and the packages that this process has imported."""
    found = {"python": platform.python_version(), "hookline": __version__, "torch": str(torch.__version__)}
    return found | {
        package: _version(package) for module, package in RECORDED_PACKAGES.items() if module in sys.modules
    }


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except Exception:  # a package that was copied, or whose metadata is damaged
        return "unknown"


def describe_machine(run: Run) -> dict[str, Any]:
    """Return the machine of rank zero, and the world size."""
    device = run.strategy.device
    name = ""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "host": socket.gethostname(),
        "system": _system(),
        "cpus": os.cpu_count(),
        "cpu": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": name,
        "world_size": run.state.world_size,
        "strategy": type(run.strategy).__name__,
        "precision": run.strategy.precision.name,
    }


@functools.cache
def _system() -> str:
    return f"{platform.platform()} {platform.machine()}"


@functools.cache
def _processor() -> str:
    """Return the model of the processor; on systems that do not show it, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


# ---- git ---------------------------------------------------------------------------------------------------


def _code_folder() -> Path:
    """Return the folder of the script, if Python was started with one; else the working directory."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    is_script = getattr(main, "__spec__", None) is None and isinstance(file, str) and file.endswith(".py")
    return Path(str(file)).absolute().parent if is_script else Path.cwd()


def code_state() -> dict[str, Any]:
    """Return the commit of the program's code, and whether it has changed since."""
    return git_state(_code_folder())


def git_state(folder: Path) -> dict[str, Any]:
    """Return the commit of the code in a folder, and whether tracked files have changed since.

    If git fails, both are None, and `problem` says why: no repository, no git, or a timeout.
    """
    program = shutil.which("git")
    has_repository = any((each / ".git").exists() for each in (folder, *folder.parents))
    if program is None or not has_repository:  # found without git, which takes 5 ms
        problem = "git is not installed" if program is None else "not a git repository"
        return {"commit": None, "dirty": None, "problem": problem}
    try:
        lines = _git(
            program,
            folder,
            "status",
            "--porcelain=v2",
            "--branch",
            "--untracked-files=no",
            "--ignore-submodules=none",
        )
    except subprocess.TimeoutExpired:
        return _commit_alone(program, folder)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"commit": None, "dirty": None, "problem": _git_problem(error)}
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    return {
        "commit": None if commit == "(initial)" else commit,
        "dirty": any(not line.startswith("#") for line in lines),
    }


def _commit_alone(program: str, folder: Path) -> dict[str, Any]:
    problem = f"git did not answer within {GIT_SECONDS:g} s"
    try:
        lines = _git(program, folder, "rev-parse", "HEAD")
    except (OSError, ValueError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None, "problem": problem}
    return {"commit": lines[0] if lines else None, "dirty": None, "problem": problem}


def _git(program: str, folder: Path, *arguments: str) -> list[str]:
    """Call git on the folder's repository, without environment overrides, and without running its hooks."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = [program, "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments]
    answer = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=GIT_SECONDS,
    )
    return answer.stdout.decode("utf-8", "replace").splitlines()


def _git_problem(error: Exception) -> str:
    said = (
        error.stderr.decode("utf-8", "replace")
        if isinstance(error, subprocess.CalledProcessError)
        else str(error)
    )
    return printable(mask_text(next(iter(said.strip().splitlines()), type(error).__name__), 200))
