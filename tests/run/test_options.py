"""Options are checked together, when the trainer is made, by messages that teach."""

from __future__ import annotations

import datetime
import inspect
import math
import pickle
import typing
from dataclasses import fields
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet, shown

from hookline import Hook, HooklineError, JSONLines, OptionError, Trainer
from hookline.distributed import SingleDevice
from hookline.engine.checks import rule_of
from hookline.run._arguments import OptionArguments, TrainerArguments
from hookline.run.options import (
    ARGUMENT_NAMES,
    OPTION_NAMES,
    Evaluation,
    Hangs,
    Options,
    Saving,
    TrainerParts,
    documentation,
    make_options,
)

WHOLE = "must be a whole number from"
AMOUNT = "must be a number of batches .* or a fraction"

BAD: list[tuple[dict[str, Any], str]] = [
    # a wrong name comes with the nearest right one and the whole list
    ({"max_epoch": 3}, "no option 'max_epoch'. Did you mean 'max_epochs'. help.hookline.Trainer. lists"),
    ({"epochs": 3}, "no option 'epochs'. Did you mean 'max_epochs'"),
    ({"gradient_clip": 1.0}, "no option 'gradient_clip'. Did you mean 'gradient_clip_val'"),
    ({"accumulate_grad_batch": 2}, "Did you mean 'accumulate_grad_batches'"),
    ({"callback": []}, "no option 'callback'. Did you mean 'callbacks'"),
    ({"devices": 1}, "no option 'devices'. Leave it out: a process uses one device. For two, run torchrun"),
    ({"loggers": []}, "no option 'loggers'. Did you mean 'logger'"),
    ({"limit_validation_batches": 1}, "Did you mean 'limit_val_batches'"),
    ({"xyz": 1}, "no option 'xyz'. Options: max_epochs"),
    # whole numbers
    ({"max_epochs": -2}, f"max_epochs=-2 {WHOLE} -1 .*no limit"),
    ({"max_epochs": 1.5}, f"max_epochs=1.5 {WHOLE}"),
    ({"max_epochs": "3"}, f"max_epochs='3' {WHOLE}"),
    ({"max_epochs": True}, f"max_epochs=True {WHOLE}"),
    ({"min_epochs": -1}, f"min_epochs=-1 {WHOLE} 0"),
    ({"max_steps": -2}, f"max_steps=-2 {WHOLE} -1"),
    ({"max_steps": 1e6}, f"max_steps=1000000.0 {WHOLE}"),
    ({"max_steps": None}, f"max_steps=None {WHOLE}"),
    ({"accumulate_grad_batches": 0}, f"accumulate_grad_batches=0 {WHOLE} 1"),
    ({"accumulate_grad_batches": {4: 2}}, f"accumulate_grad_batches={{4: 2}} {WHOLE} 1"),
    ({"check_val_every_n_epoch": 0}, f"check_val_every_n_epoch=0 {WHOLE} 1"),
    ({"num_sanity_val_steps": -2}, f"num_sanity_val_steps=-2 {WHOLE} -1"),
    ({"log_every_n_steps": 0}, f"log_every_n_steps=0 {WHOLE} 1"),
    ({"seed": -1}, f"seed=-1 {WHOLE} 0"),
    ({"seed": "42"}, f"seed='42' {WHOLE} 0"),
    # amounts
    ({"limit_train_batches": -1}, f"limit_train_batches=-1 {AMOUNT}"),
    ({"limit_train_batches": 1.5}, f"limit_train_batches=1.5 {AMOUNT}"),
    ({"limit_val_batches": True}, f"limit_val_batches=True {AMOUNT}"),
    ({"limit_test_batches": "10%"}, f"limit_test_batches='10%' {AMOUNT}"),
    ({"limit_predict_batches": math.nan}, f"limit_predict_batches=nan {AMOUNT}"),
    ({"overfit_batches": -0.5}, f"overfit_batches=-0.5 {AMOUNT}"),
    ({"val_check_interval": 0}, f"val_check_interval=0 {AMOUNT}"),
    ({"val_check_interval": 0.0}, f"val_check_interval=0.0 {AMOUNT}"),
    ({"val_check_interval": 2.5}, f"val_check_interval=2.5 {AMOUNT}"),
    ({"gradient_clip_val": 0}, "gradient_clip_val=0 must be a number above 0, or None"),
    ({"gradient_clip_val": -1.0}, "gradient_clip_val=-1.0 must be a number above 0"),
    ({"gradient_clip_val": "1"}, "gradient_clip_val='1' must be a number above 0"),
    ({"gradient_clip_val": math.nan}, "gradient_clip_val=nan must be a number above 0"),
    # choices
    (
        {"gradient_clip_algorithm": "norms"},
        "gradient_clip_algorithm='norms', allowed: 'norm', 'value'. Did you mean 'norm'",
    ),
    ({"nonfinite": "skipp"}, "nonfinite='skipp', allowed: 'stop', 'skip'. Did you mean 'skip'"),
    ({"nonfinite": None}, "nonfinite=None, allowed: 'stop', 'skip'"),
    (
        {"precision": "bf16-mix"},
        "precision='bf16-mix', allowed: 32, 'bf16-mixed', .*'16-true'. Did you mean 'bf16-mixed'",
    ),
    ({"precision": 128}, "precision=128, allowed: 32"),
    ({"precision": "float64"}, "precision='float64', allowed: .*Did you mean '64'"),
    ({"strategy": "singel"}, "strategy='singel', allowed: .*Did you mean 'single'"),
    ({"strategy": 5}, "strategy=5, allowed: .*or a Strategy object"),
    ({"device": "gpu"}, "device='gpu' is not a device. Did you mean 'cuda'\\?$"),
    ({"device": 1.5}, "device=1.5 is not a device"),
    # time
    ({"max_time": 0}, "max_time=0: use seconds, '2 hours', 'DD:HH:MM:SS' or a timedelta"),
    ({"max_time": -5.0}, "max_time=-5.0: use"),
    ({"max_time": "5 steps"}, "max_time='5 steps': use"),
    ({"max_time": "soon"}, "max_time='soon': use"),
    ({"max_time": "1:00:00"}, "max_time='1:00:00': use"),
    ({"max_time": math.nan}, "max_time=nan: use"),
    ({"max_time": "00:00:00:00"}, "max_time='00:00:00:00'"),
    ({"max_time": datetime.timedelta(0)}, "max_time="),
    ({"max_time": datetime.timedelta(seconds=-1)}, "max_time="),
    # yes or no: text is always true, so "false" from a configuration file would mean yes
    ({"fast_dev_run": -1}, "fast_dev_run=-1 must be True, False or a number of batches"),
    ({"fast_dev_run": "yes"}, "fast_dev_run='yes' must be True, False or a number of batches"),
    ({"fast_dev_run": 0.5}, "fast_dev_run=0.5 must be True, False or a number of batches"),
    ({"enable_progress_bar": "false"}, "enable_progress_bar='false'.*True.*False"),
    ({"deterministic": "false"}, "deterministic='false'.*True.*False"),
    ({"compile": "false"}, "compile='false'.*True.*False"),
    ({"compile": {"block": "Block"}}, "compile has no option 'block'. Did you mean 'blocks'"),
    ({"compile": {"blocks": []}}, r"compile: blocks=\[\] must be True or at least one choice of layers"),
    ({"audit": "false"}, "audit='false' must be True, False or a table of changes, costs, trace"),
    ({"audit": {"cost": True}}, "audit has no setting 'cost'. Did you mean 'costs'"),
    ({"accounting": "false"}, "accounting='false'.*True.*False"),
    # directories
    ({"default_root_dir": None}, "default_root_dir=None"),
    ({"run_dir": 5}, "run_dir=5"),
    # combinations
    ({"min_epochs": 5, "max_epochs": 3}, "min_epochs=5 is more than max_epochs=3"),
    ({"min_steps": 5, "max_steps": 3}, "min_steps=5 is more than max_steps=3"),
    (
        {"strategy": SingleDevice(torch.device("cpu")), "precision": "bf16-mixed"},
        "precision='bf16-mixed'.*strategy",
    ),
    ({"strategy": SingleDevice(torch.device("cpu")), "device": "meta"}, "device='meta'.*strategy"),
    # what the trainer is given
    ({"logger": "tensorboard"}, "logger='tensorboard' must be True, False, a Logger, or a list of them"),
    ({"logger": [JSONLines(), 5]}, "logger=5 must be True, False, a Logger"),
    ({"hooks": 5}, "hooks= takes a hook or a list of hooks, not int"),
    ({"hooks": "report"}, "hooks= takes a hook or a list of hooks, not str"),
    ({"callbacks": {"a": Hook()}}, "callbacks= takes a hook or a list of hooks, not dict"),
]


@pytest.mark.parametrize(
    ("options", "message"), BAD, ids=[" ".join(f"{k}={shown(v)}" for k, v in each.items()) for each, _ in BAD]
)
def test_a_bad_construction_is_refused_at_once_and_says_what_is_allowed(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        Trainer(**options)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, HooklineError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(OptionError, match="device='cuda'"):
        Trainer(device="cuda")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_epoch", "Did you mean 'max_epochs'? help(hookline.Trainer) lists all options."),
        (
            "early_stopping",
            "Add the hook EarlyStopping: hooks=[EarlyStopping()]. help(hookline.Trainer) lists all options.",
        ),
        ("accelerator", "Did you mean 'device'? help(hookline.Trainer) lists all options."),
        (
            "loss",
            "It is an argument of fit: trainer.fit(..., loss=...). help(hookline.Trainer) lists all options.",
        ),
        (
            "learning_rate",
            "It belongs to the optimizer: torch.optim.Adam(..., lr=...). help(hookline.Trainer) lists all options.",
        ),
        (
            "inference_mode",
            "Use evaluation={'inference_mode': True}; the default is torch.no_grad. help(hookline.Trainer) lists all options.",
        ),
    ],
)
def test_an_option_with_a_known_right_name_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Trainer(**{name: 1})
    assert str(caught.value) == f"Trainer has no option {name!r}. {message}"
    assert "max_steps" in caught.value.allowed
    assert "max_steps" in inspect.getdoc(Trainer) or "max_steps" in str(inspect.signature(Trainer))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("epochs", " It is an option of Trainer: Trainer(max_epochs=...)."),
        ("ckpt_path", " Did you mean 'resume'?"),
        ("train_loader", " Did you mean 'train'?"),
        ("batch_size", " It belongs to the loader: DataLoader(dataset, batch_size=...)."),
        ("nothing", ""),
    ],
)
def test_an_argument_of_fit_that_does_not_exist_says_where_it_belongs(name: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        Trainer().fit(torch.nn.Linear(1, 1), **{name: 1})
    assert str(caught.value).startswith(f"fit() has no argument {name!r}.{hint} Arguments: module, train")
    with pytest.raises(OptionError, match=r"'lr'.* Nor 'val_dataloaders'. Did you mean 'val'\?"):
        Trainer().fit(torch.nn.Linear(1, 1), lr=1, val_dataloaders=1)


def test_all_unknown_options_are_refused_together() -> None:
    with pytest.raises(OptionError) as caught:
        Trainer(accelerator="cpu", devices=1, max_epochs=1)  # type: ignore[call-arg]
    first, second = str(caught.value).splitlines()
    assert first == "Trainer has no option 'accelerator'. Did you mean 'device'?"
    assert second.startswith("Trainer has no option 'devices'. Leave it out: a process uses one device.")
    assert caught.value.option == "accelerator"


@pytest.mark.parametrize("name", ["events", "audit"])
def test_a_refusal_lists_what_the_trainer_takes_and_nothing_else(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        Trainer(no_such_option=1)  # type: ignore[call-arg]
    listed = str(caught.value).partition("Options: ")[2].rstrip(".").split(", ")
    try:
        Trainer(**{name: True})
    except OptionError:
        assert name not in listed
    else:
        assert name in listed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_epochs": -1, "max_steps": 5},
        {"max_epochs": 0},
        {"limit_train_batches": 0},
        {"limit_val_batches": 0.0},
        {"val_check_interval": 3},
        {"val_check_interval": 0.25},
        {"gradient_clip_val": 1, "gradient_clip_algorithm": "value"},
        {"fast_dev_run": 3},
        {"num_sanity_val_steps": -1},
        {"precision": "32-true"},
        {"precision": "bf16"},
        {"device": "cpu"},
        {"device": torch.device("cpu")},
        {"logger": []},
        {"logger": [JSONLines()]},
        {"compile": {"dynamic": True}},
        {"hooks": (Hook(),)},
        {"hooks": iter([Hook()])},
        {"strategy": "single"},
        {"strategy": SingleDevice(torch.device("cpu"))},
    ],
    ids=shown,
)
def test_good_options_are_taken(options: dict[str, Any]) -> None:
    assert isinstance(Trainer(**options), Trainer)


def test_how_long_to_train_when_little_is_said() -> None:
    assert Options().max_epochs == 1000
    assert Options(max_steps=10).max_epochs == -1
    assert Options(max_time=5).max_epochs == -1
    assert Options(max_steps=10, max_epochs=3).max_epochs == 3


def test_fast_dev_run_runs_n_batches_of_everything_once_and_writes_nothing(tmp_path: Any) -> None:
    class Counts(Net):
        seen = {"train": 0, "val": 0}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen["train"] += 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen["val"] += 1
            return super().validation_step(batch, batch_idx)

    net = Counts()
    Trainer(fast_dev_run=2, max_epochs=50, accumulate_grad_batches=3, enable_progress_bar=False).fit(
        net, batches(5), batches(5)
    )
    assert net.seen == {"train": 2, "val": 2}
    assert list(tmp_path.iterdir()) == []


def test_overfitting_sees_the_same_batches_every_epoch() -> None:
    class Remembers(Net):
        first: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.first.append(float(batch[0].sum()))
            return super().training_step(batch, batch_idx)

    net = Remembers()
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randn(20, 2))
    quiet(overfit_batches=2, max_epochs=3).fit(
        net, torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    )
    assert len(net.first) == 6
    assert net.first[:2] == net.first[2:4] == net.first[4:]


# ---- declared once ------------------------------------------------------------------------------------------------


def test_the_typed_arguments_are_exactly_the_declared_ones() -> None:
    assert set(OptionArguments.__annotations__) == set(OPTION_NAMES)
    assert set(TrainerArguments.__annotations__) == set(ARGUMENT_NAMES)
    types = typing.get_type_hints(OptionArguments)
    assert types == typing.get_type_hints(Options)  # without the checks of Annotated


def test_consoles_and_notebooks_see_every_argument_with_its_default() -> None:
    parameters = inspect.signature(Trainer).parameters
    assert tuple(parameters) == ARGUMENT_NAMES
    assert {name: each.default for name, each in parameters.items()} == {
        each.name: each.default for cls in (Options, TrainerParts) for each in fields(cls)
    }


def test_every_option_is_checked_and_every_argument_documented() -> None:
    assert [each.name for each in fields(Options) if rule_of(each.type) is None] == []
    assert set(documentation()) == set(ARGUMENT_NAMES)


@pytest.mark.parametrize(
    "option", [*OPTION_NAMES, "hooks", "callbacks", "logger", "strategy", "device", "precision", "audit"]
)
def test_an_error_carries_the_option_the_value_and_what_is_allowed(option: str) -> None:
    wrong = object()
    with pytest.raises(OptionError) as refused:
        Trainer(**{option: wrong})
    assert refused.value.option == option
    assert refused.value.value is wrong
    assert refused.value.allowed or option == "device"  # which devices there are, torch knows


@pytest.mark.parametrize(
    ("given", "option", "value", "allowed"),
    [
        ({"max_epoch": 3}, "max_epoch", None, ARGUMENT_NAMES),
        ({"nonfinite": "skipp"}, "nonfinite", "skipp", ("stop", "skip")),
        ({"max_steps": -2}, "max_steps", -2, "a whole number from -1 (-1: no limit)"),
        ({"min_epochs": 5, "max_epochs": 3}, "min_epochs", 5, "at most max_epochs=3"),
        ({"checkpoint": {"write": "asink"}}, "checkpoint.write", "asink", ("sync", "async")),
        (
            {"checkpoint": {"writes": 1}},
            "checkpoint.writes",
            1,
            ("last", "every", "write", "on_error", "weights"),
        ),
        ({"save": "asink"}, "save", "asink", ("sync", "async")),
    ],
    ids=str,
)
def test_an_error_says_in_attributes_what_it_says_in_words(
    given: dict[str, Any], option: str, value: Any, allowed: Any
) -> None:
    with pytest.raises(OptionError) as refused:
        Trainer(**given)
    assert (refused.value.option, refused.value.value, refused.value.allowed) == (option, value, allowed)
    copied = pickle.loads(pickle.dumps(refused.value))
    assert (str(copied), copied.option, copied.allowed) == (str(refused.value), option, allowed)


def test_an_option_that_does_not_exist_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        Options().max_epoch = 3  # type: ignore[attr-defined]


def test_options_given_to_one_trainer_do_not_leak_into_another() -> None:
    given: dict[str, Any] = {"max_epochs": 2}
    make_options(given)
    assert given == {"max_epochs": 2}
    assert Trainer().options.max_epochs == 1000


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Trainer(accelerator="gpu"), "no option 'accelerator'. Did you mean 'device'?"),  # type: ignore[call-arg]
        (
            lambda: Trainer(enable_checkpointing=False),  # type: ignore[call-arg]
            "no option 'enable_checkpointing'. Use 'checkpoint': checkpoint=False saves no",
        ),
        (
            lambda: Trainer(enable_model_summary=False),  # type: ignore[call-arg]
            "Leave it out: a summary is shown only by the hook ModelSummary.",
        ),
        (
            lambda: Trainer(benchmark=True),  # type: ignore[call-arg]
            "Set torch.backends.cudnn.benchmark = True",
        ),
        (
            lambda: quiet().fit(Net(), train_dataloaders=batches(1)),
            "fit() has no argument 'train_dataloaders'. Did you mean 'train'?",
        ),
        (
            lambda: quiet().fit(Net(), batches(1), val_dataloaders=[]),
            "Did you mean 'val'? Arguments: module, train, val, datamodule",
        ),
        (lambda: quiet().fit(Net(), batches(1), ckpt_path="x"), "Did you mean 'resume'?"),
        (
            lambda: quiet().validate(Net(), batches(1), ckpt_path="x"),
            "validate() has no argument 'ckpt_path'. Did you mean 'checkpoint'?",
        ),
        (
            lambda: quiet().test(Net(), dataloaders=[]),
            "test() has no argument 'dataloaders'. Did you mean 'loaders'?",
        ),
        (
            lambda: quiet().predict(Net(), loader=[]),
            "predict() has no argument 'loader'. Did you mean 'loaders'?",
        ),
        (lambda: quiet().on("step_end", evry=20), "on() has no argument 'evry'. Did you mean 'every'?"),
        (lambda: quiet().fit(Net(), batches(1), resume="last"), "resume='last'"),
        (lambda: quiet().fit(Net(), batches(1), resume="last"), "Did you mean 'auto'?"),
    ],
)
def test_names_from_other_systems_lead_to_ours(call: Any, said: str) -> None:
    with pytest.raises(OptionError) as refused:
        call()
    assert said in str(refused.value)


def test_a_far_fetched_name_is_not_suggested() -> None:
    with pytest.raises(OptionError) as refused:
        make_options({"telemetry": True})
    assert "Did you mean" not in str(refused.value)


# ---- checkpoint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({}, Saving()),
        ({"checkpoint": True}, Saving()),
        ({"checkpoint": False}, Saving(last=False)),
        ({"checkpoint": "async"}, Saving(write="async")),
        ({"checkpoint": "sync"}, Saving()),
        ({"checkpoint": {"every": "1 minutes", "on_error": "warn"}}, Saving(every=60.0, on_error="warn")),
        ({"checkpoint": {"last": False, "write": "async"}}, Saving(last=False, write="async")),
        ({"save": "async"}, Saving(write="async")),
        ({"on_save_error": "warn"}, Saving(on_error="warn")),
        ({"save": "async", "on_save_error": "warn"}, Saving(write="async", on_error="warn")),
    ],
    ids=str,
)
def test_checkpoint_and_its_older_names(given: dict[str, Any], means: Saving) -> None:
    assert make_options(given).saving == means


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"checkpoint": "asink"}, "checkpoint='asink', allowed: 'sync', 'async'. Did you mean 'async'?"),
        (
            {"checkpoint": None},
            "checkpoint=None must be True, False, 'sync', 'async' or a table of last, every, write, on_error",
        ),
        ({"checkpoint": 3}, "checkpoint=3 must be True, False"),
        (
            {"checkpoint": {"writes": "async"}},
            "checkpoint has no setting 'writes'. Did you mean 'write'? Settings: last, every",
        ),
        ({"checkpoint": {"write": "asink"}}, "checkpoint: write='asink', allowed: 'sync', 'async'"),
        ({"checkpoint": {"on_error": "ignore"}}, "checkpoint: on_error='ignore', allowed: 'raise', 'warn'"),
        ({"checkpoint": {"every": "soon"}}, "checkpoint: every='soon'"),
        ({"checkpoint": {"every": 0}}, "checkpoint: every=0"),
        ({"checkpoint": {"every": None}}, "checkpoint: every=None"),
        ({"checkpoint": {"last": "no"}}, "checkpoint: last='no' must be True or False"),
        ({"save": "asink"}, "save='asink', allowed: 'sync', 'async'. Did you mean 'async'?"),
        ({"on_save_error": "wran"}, "on_save_error='wran', allowed: 'raise', 'warn'. Did you mean 'warn'?"),
        ({"save": "async", "checkpoint": True}, "checkpoint and save cannot be combined"),
        ({"on_save_error": "warn", "checkpoint": False}, "checkpoint and on_save_error cannot be combined"),
    ],
    ids=str,
)
def test_a_wrong_checkpoint_is_refused_with_what_is_allowed(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as refused:
        make_options(given)
    assert said in str(refused.value)


# ---- hang_after and evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({}, Hangs()),
        ({"hang_after": None}, Hangs(None)),
        ({"hang_after": "1 minutes"}, Hangs(60.0)),
        ({"hang_after": {"action": "abort"}}, Hangs(600.0, "abort")),
        ({"hang_after": {"after": "1 minutes", "action": "abort"}}, Hangs(60.0, "abort")),
        ({"hang_after": {"after": None}}, Hangs(None)),
        ({"hang_action": "abort"}, Hangs(600.0, "abort")),
        ({"hang_after": "1 minutes", "hang_action": "abort"}, Hangs(60.0, "abort")),
    ],
    ids=shown,
)
def test_a_hang_has_a_time_and_an_action_also_by_its_older_name(given: dict[str, Any], means: Hangs) -> None:
    assert make_options(given).hangs == means


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({}, Evaluation()),
        ({"evaluation": {}}, Evaluation()),
        ({"evaluation": {"inference_mode": True}}, Evaluation(inference_mode=True)),
        ({"evaluation": {"aggregation": max}}, Evaluation(aggregation=max)),
        ({"val_aggregation": "macro"}, Evaluation(aggregation="macro")),
    ],
    ids=shown,
)
def test_evaluation_and_its_older_name(given: dict[str, Any], means: Evaluation) -> None:
    assert make_options(given).evaluating == means


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"hang_after": {"afer": 3}},
            "hang_after has no setting 'afer'. Did you mean 'after'.*Settings: after",
        ),
        (
            {"hang_after": {"action": "abrt"}},
            "hang_after: action='abrt', allowed: 'warn', 'abort'. Did you mean",
        ),
        ({"hang_after": "soon"}, "hang_after='soon': use seconds.* Or a table of after, action"),
        ({"hang_action": "abrt"}, "hang_action='abrt', allowed: 'warn', 'abort'. Did you mean 'abort'"),
        (
            {"hang_after": {"after": 3}, "hang_action": "warn"},
            "hang_after and hang_action cannot be combined.*Pass hang_after={'after': 3, 'action': 'warn'}",
        ),
        ({"evaluation": "macro"}, "evaluation='macro' must be a table of inference_mode, aggregation"),
        (
            {"evaluation": {"agregation": 1}},
            "evaluation has no setting 'agregation'. Did you mean 'aggregation'",
        ),
        ({"evaluation": {"inference_mode": 1}}, "evaluation: inference_mode=1 must be True or False"),
        ({"evaluation": {}, "val_aggregation": "micro"}, "evaluation and val_aggregation cannot be combined"),
    ],
    ids=shown,
)
def test_a_wrong_table_is_refused_with_what_is_allowed(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Trainer(**given)


def test_the_number_of_arguments_does_not_grow() -> None:
    assert len(ARGUMENT_NAMES) <= 43


def test_validation_counted_through_the_run_as_in_lightning_says_what_to_use() -> None:
    with pytest.raises(OptionError, match=r"check_val_every_n_epoch=None .*@every\('500 steps'\)"):
        quiet(check_val_every_n_epoch=None, val_check_interval=500)
