"""Every option of the trainer and of every built-in hook, with values that nobody can mean: it trains, or it is refused before that."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
from dataclasses import fields
from typing import Any

import pytest
from optuna.trial import FixedTrial
from tiny import Net, batches

from hookline import Hook, HooklineError, OptionError, Trainer, loggers
from hookline.data.seeding import seed_everything
from hookline.engine.registry import BUILTIN_HOOKS, hook_class
from hookline.loggers import JSONLines
from hookline.run.options import Options

ABSURD: dict[str, Any] = {
    "None": None,
    "True": True,
    "empty": "",
    "blank": "  ",
    "text": "nonsense",
    "NUL": "a\0b",
    "long": "x" * 300,
    "-1": -1,
    "-2": -2,
    "0": 0,
    "half": 0.5,
    "1.5": 1.5,
    "huge": 2**70,
    "1e300": 1e300,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "list": [],
    "[None]": [None],
    "[text]": ["nonsense"],
    "dict": {},
    "{1: 2}": {1: 2},
    "bytes": b"x",
    "object": Hook,
    "function": abs,
}
NEEDED: dict[str, dict[str, Any]] = {
    "freeze_schedule": {"schedule": {"layer.*": "1 steps"}},
    "webhook": {"url": "https://localhost:1/x"},
    "upload_checkpoint": {"url": "memory://absurd"},
    "mixture_schedule": {"phases": {0: {"train": 1}}},
    "generate_samples": {"prompts": ["x"], "generate": lambda module, prompt: prompt},
    "optuna_pruning": {"trial": FixedTrial({})},
    "accumulation_schedule": {"schedule": {0: 2}},
    "exclude_samples": {"samples": [1]},
    "parameter_schedule": {"target": "optimizer.weight_decay", "end": 0.0},
}

LATER = {
    ("early_stopping", "monitor"),
    ("model_checkpoint", "monitor"),
    ("optuna_pruning", "monitor"),
    ("loss_schedule", "replace"),
    ("loss_schedule", "weight"),
}
"""What only shows in the first step or validation: a metric of any name may be logged, and a loss is judged when it is computed."""


class Counts(Net):
    """Counts its training steps."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def verdict(options: dict[str, Any]) -> str:
    """'trained', 'refused', or what went wrong."""
    net = Counts()
    given = {
        "max_steps": 2,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "control": False,
        "checkpoint": {"last": False},  # writing it would take half of the time
        **options,
    }
    try:
        trainer = Trainer(**given)
        trainer.fit(net, batches(2), batches(1))
    except HooklineError as error:
        if net.steps:
            return f"refused only after {net.steps} steps: {type(error).__name__}: {error}"
        return "refused" if len(str(error)) < 1500 else f"a message of {len(str(error))} letters"
    except BaseException as error:
        return f"{type(error).__name__} after {net.steps} steps: {str(error)[:200]}"
    return "trained"


@pytest.mark.parametrize("option", [each.name for each in fields(Options)])
def test_an_option_trains_or_is_refused_before_the_first_step(option: str) -> None:
    wrong = {}
    for name, value in ABSURD.items():
        if (option, name) == ("compile", "True"):  # nothing absurd, and it takes long
            continue
        came = verdict({option: value})
        if came not in ("trained", "refused"):
            wrong[name] = came
    assert wrong == {}, wrong


@pytest.mark.parametrize("name", BUILTIN_HOOKS)
def test_a_hooks_parameter_is_refused_before_the_first_step(name: str) -> None:
    cls, wrong = hook_class(name), {}
    if name == "garbage_collection":  # a thousand full collections: not of what was imported so far
        verdict({})
        gc.collect()
        gc.freeze()
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for about, value in ABSURD.items():
            came = "refused"
            hook: Any = None
            with contextlib.suppress(HooklineError):
                try:
                    hook = cls(**{**NEEDED.get(name, {}), parameter.name: value})
                except HooklineError:
                    raise
                except Exception as error:
                    came = f"{type(error).__name__} when it was made: {str(error)[:200]}"
            if hook is not None:
                came = verdict({"hooks": [hook]})
            if came not in ("trained", "refused") and not (
                (name, parameter.name) in LATER and came.startswith("refused only after")
            ):
                wrong[f"{parameter.name}={about}"] = came
    assert wrong == {}, wrong


@pytest.mark.parametrize(
    "argument", ["hooks", "callbacks", "logger", "strategy", "device", "precision", "accounting", "audit"]
)
def test_the_other_arguments_of_the_trainer_too(argument: str) -> None:
    wrong = {
        name: came
        for name, value in ABSURD.items()
        if (came := verdict({argument: value})) not in ("trained", "refused")
    }
    assert wrong == {}, wrong


@pytest.mark.parametrize("name", ["JSONLines", "CSV", "Console", "TensorBoard", "Queued"])
def test_a_loggers_parameter_is_refused_before_the_first_step(name: str) -> None:
    cls, wrong = getattr(loggers, name), {}
    for parameter in inspect.signature(cls).parameters.values():
        for about, value in ABSURD.items():
            given = {
                **({"logger": JSONLines("queued.jsonl")} if name == "Queued" else {}),
                parameter.name: value,
            }
            try:
                made = cls(**given)
            except OptionError:
                continue
            except Exception as error:
                wrong[f"{parameter.name}={about}"] = (
                    f"{type(error).__name__} when it was made: {str(error)[:200]}"
                )
                continue
            if (came := verdict({"logger": made})) not in ("trained", "refused"):
                wrong[f"{parameter.name}={about}"] = came
    assert wrong == {}, wrong


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"seed": 2**70},
            r"seed=1180591620717411303424 must be a whole number from 0 to 18446744073709551615 \(2\*\*64 - 1\)",
        ),
        ({"seed": -1}, "seed=-1 must be a whole number from 0"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": True}, "seed=True"),
        ({"seed": "1"}, "seed='1'"),
        ({"max_time": 1e300}, "max_time=1e"),
        ({"hang_after": math.nan}, "hang_after=nan"),
        ({"compile": {1: 2}}, "compile="),
        ({"val_aggregation": "primary:"}, "val_aggregation='primary:'"),
        ({"val_aggregation": "primry:web"}, "val_aggregation='primry:web'"),
        ({"limit_val_batches": math.nan}, "limit_val_batches=nan"),
        ({"gradient_clip_val": math.nan}, "gradient_clip_val=nan"),
        ({"val_check_interval": 0}, "val_check_interval=0"),
    ],
)
def test_these_are_refused_when_the_trainer_is_made(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Trainer(**options)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_every_seed_that_torch_takes_seeds_a_run(seed: int) -> None:
    assert verdict({"seed": seed}) == "trained"
    seed_everything(seed)


@pytest.mark.parametrize("seed", [2**64, -1, 1.0, None])
def test_no_other_seeds_anything(seed: Any) -> None:
    with pytest.raises(OptionError, match="2.*64 - 1"):
        seed_everything(seed)
