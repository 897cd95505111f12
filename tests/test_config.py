"""Configurations: what they make, what they refuse and how, and what they may import."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from hookline import Hook, HooklineError, OptionError, Trainer
from hookline.config import Config, ConfigError, HooksConfig, load_config, schema
from hookline.config.classes import annotation, parameters
from hookline.config.files import read, split_overrides
from hookline.config.load import SECTIONS
from hookline.config.permissions import Permissions
from hookline.config.problems import Override, spelled
from hookline.config.schema import of_type
from hookline.config.sections import TrainerSettings, option_names
from hookline.distributed import DDP, FSDP, Accelerated
from hookline.engine.registry import BUILTIN_HOOKS, GROUP, hook_class
from hookline.hooks.console_log import ConsoleLog
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.hooks.lr_monitor import LRMonitor
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.loggers import CSV, Console, JSONLines, MLflow, Queued, TensorBoard, Trackio, WandB

LOGGERS = (CSV, Console, JSONLines, MLflow, Queued, TensorBoard, Trackio, WandB)
STOP = "hookline.hooks.early_stopping.EarlyStopping"
KEEP = "hookline.hooks.model_checkpoint.ModelCheckpoint"
PARTS = """
from __future__ import annotations
import abc
from typing import Literal
import torch
from torch import nn
from torch.nn import functional as F
from hookline import DataModule, Hook, Logger, Module, OptionError, on
from hookline.distributed import SingleDevice

class Net(Module):
    def __init__(self, width: int = 4, act: nn.Module | None = None, kind: Literal["plain", "deep"] = "plain") -> None:
        super().__init__()
        self.layer, self.width, self.act, self.kind = nn.Linear(4, 2), width, act, kind
    def training_step(self, batch, batch_idx): return F.mse_loss(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx): return self.training_step(batch, batch_idx)
    test_step = validation_step
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)

class Needy(Net):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

class Untyped(Hook):
    def __init__(self, url): self.url = url

class Several(DataModule):
    def train_dataloader(self): return {name: [(torch.ones(2, 4), torch.ones(2, 2))] * 4 for name in ("web", "code")}

class Data(DataModule):
    def __init__(self, batches: int = 3) -> None: self.batches = batches
    def train_dataloader(self): return [(torch.ones(2, 4), torch.ones(2, 2))] * self.batches
    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

class Threshold(Hook):
    def __init__(self, threshold: float = 10.0, tags: list[str] | None = None) -> None:
        self.threshold, self.tags = threshold, tags
        if threshold < 0:
            raise OptionError(f"tags={tags} and a negative threshold", option="threshold", value=threshold)
        if tags == []:
            raise ValueError("tags=[] must not be empty")

class Second(Hook):
    def on_train_start(self, config): self.config = config

class Typo(Hook):
    def on_step_ned(self): pass

class Abstract(Hook, abc.ABC):
    @abc.abstractmethod
    def choose(self): ...

class Nested(Hook):
    def __init__(self, loss: nn.Module, anything=None) -> None: self.loss, self.anything = loss, anything

class Lines(Logger):
    def __init__(self, prefix: str = "") -> None: self.prefix = prefix

class Here(SingleDevice):
    def __init__(self) -> None: super().__init__(torch.device("cpu"))

@on("train_start")
def hello(step): print("hello at", step)

def not_a_class(): pass

def mean_loss(outputs, targets): return (outputs - targets).abs().mean()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a module beside the configurations."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "parts_here.py").write_text(PARTS)
    path, modules = list(sys.path), set(sys.modules)
    yield folder
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("parts_here"):
            del sys.modules[name]


QUIET = "[trainer]\nmax_epochs = 1\nenable_progress_bar = false\n"
BASIC = f'module = "parts_here.Net"\ndatamodule = "parts_here.Data"\nloggers = false\n{QUIET}'


def config_of(
    project: Path, text: str = BASIC, *overrides: str, name: str = "run.toml", **more: Any
) -> Config:
    (project / name).write_text(text)
    return load_config(project / name, overrides, **more)


def trainer_of(project: Path, text: str = BASIC, *overrides: str, **more: Any) -> tuple[Trainer, Any]:
    parts = config_of(project, text, *overrides, **more).build()
    return parts.make_trainer(Trainer), parts


# ---- what a configuration makes ----------------------------------------------------------------------------------


def test_a_file_becomes_a_run(project: Path) -> None:
    trainer, parts = trainer_of(
        project, BASIC + '[hooks.stop]\nclass_path = "parts_here.Threshold"\nthreshold = 3\n'
    )
    trainer.fit(parts.module, datamodule=parts.datamodule, **parts.fit_arguments)
    assert trainer.status == "completed"
    assert trainer.global_step == 3
    assert trainer.hooks["stop"].threshold == 3.0


def test_yaml_and_toml_say_the_same(project: Path) -> None:
    yaml = """
module: {class_path: parts_here.Net, init_args: {width: 7}}
trainer: {max_epochs: 1, gradient_clip_val: 1e-3, max_time: "00:01:00:00", enable_progress_bar: false}
hooks:
  one: {class_path: parts_here.Threshold, threshold: 1e-2}
"""
    toml = """
trainer = {max_epochs = 1, gradient_clip_val = 1e-3, max_time = "00:01:00:00", enable_progress_bar = false}
[module]
class_path = "parts_here.Net"
init_args.width = 7
[hooks.one]
class_path = "parts_here.Threshold"
threshold = 1e-2
"""
    ours = [config_of(project, text, name=name) for text, name in ((yaml, "a.yaml"), (toml, "a.toml"))]
    assert ours[0].values == ours[1].values
    for config in ours:
        parts = config.build()
        assert parts.module.width == 7
        assert parts.hooks["one"].threshold == 0.01
        assert parts.make_trainer(Trainer).options.max_time == 3600.0


@pytest.mark.parametrize(
    "form",
    [
        'class_path = "parts_here.Threshold"\nthreshold = 2.5',
        'class_path = "parts_here.Threshold"\ninit_args = {threshold = 2.5}',
        'class_path = "parts_here:Threshold"\nthreshold = 2.5',
    ],
)
def test_arguments_stand_beside_the_class_path_or_in_init_args(project: Path, form: str) -> None:
    _, parts = trainer_of(project, f"{BASIC}[hooks.mine]\n{form}\n")
    assert parts.hooks["mine"].threshold == 2.5


def test_hooks_as_a_plain_list_of_dotted_names(project: Path) -> None:
    text = 'hooks = ["parts_here.Second", "progress_bar", "parts_here.hello"]\nmodule = "parts_here.Net"'
    trainer, _ = trainer_of(project, text)
    assert trainer.hooks.list_hooks() == ["second", "progress_bar", "hello"]


def test_a_hook_of_a_list_can_be_overridden_by_its_name(project: Path) -> None:
    text = 'hooks = ["parts_here.Threshold"]\nmodule = "parts_here.Net"'
    _, parts = trainer_of(project, text, "--hooks.threshold.threshold", "4")
    assert parts.hooks["threshold"].threshold == 4.0


@pytest.mark.parametrize("written", ["patience = 3", "init_args.patience = 3", ""])
def test_one_named_hook_is_overridden_from_the_command_line(project: Path, written: str) -> None:
    text = f'{BASIC}[hooks.stop]\nclass_path = "{STOP}"\n{written}\n[hooks.other]\nclass_path = "parts_here.Threshold"\n'
    trainer, parts = trainer_of(project, text, "--trainer.max_epochs", "3", "--hooks.stop.patience", "9")
    assert trainer.options.max_epochs == 3
    assert parts.hooks["stop"].patience == 9
    assert parts.hooks["other"].threshold == 10.0


def test_init_args_can_be_overridden_under_either_spelling(project: Path) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Threshold"\nthreshold = 1\n'
    _, parts = trainer_of(project, text, "--hooks.one.init_args.threshold", "2")
    assert parts.hooks["one"].threshold == 2.0


def test_sections_can_be_overridden_as_a_whole(project: Path) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Threshold"\n'
    trainer, parts = trainer_of(
        project, text, "--hooks", "false", "--module", "parts_here.Needy", "--module.classes", "3"
    )
    assert trainer.hooks.list_hooks() == []
    assert parts.module.classes == 3


def test_a_name_given_to_the_class_is_the_hooks_name(project: Path) -> None:
    trainer, _ = trainer_of(project, f'{BASIC}[hooks.one]\nclass_path = "{STOP}"\nname = "brake"\n')
    assert trainer.hooks["brake"].patience == 3


@pytest.mark.parametrize(("typed", "value"), [("[a, b]", ["a", "b"]), ('["a"]', ["a"]), ("null", None)])
def test_the_command_line_gives_lists_and_null(project: Path, typed: str, value: Any) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Threshold"\n'
    assert trainer_of(project, text, f"--hooks.one.tags={typed}")[1].hooks["one"].tags == value


def test_text_that_looks_like_a_number_stays_text_where_text_is_wanted(project: Path) -> None:
    text = BASIC.replace("loggers = false", 'loggers = {mine = {class_path = "parts_here.Lines"}}')
    trainer, _ = trainer_of(project, text, "--loggers.mine.prefix", "007")
    assert trainer.loggers.members[0].prefix == "007"


def test_a_hook_is_left_out_switched_off_or_added_from_the_command_line(project: Path) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Threshold"\n[hooks.two]\nclass_path = "parts_here.Second"\n'
    trainer, _ = trainer_of(
        project, text, "--hooks.one", "false", "--hooks.two.enabled", "false", hooks=["parts_here.hello"]
    )
    assert "one" not in trainer.hooks
    assert "two" in trainer.hooks
    assert trainer.hooks.list_hooks() == ["hello"]


def test_settings_of_any_hook_are_set_beside_its_own(project: Path) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Second"\non_error = "warn"\norder = 7\nranks = "zero"\n'
    _, parts = trainer_of(project, text)
    assert (parts.hooks["one"].on_error, parts.hooks["one"].order, parts.hooks["one"].ranks) == (
        "warn",
        7,
        "zero",
    )


def test_a_hook_by_its_registered_name_needs_no_class_path(project: Path) -> None:
    text = BASIC.replace("enable_progress_bar = false\n", "") + "[hooks.progress_bar]\nrefresh = 0.5\n"
    trainer, _ = trainer_of(project, text)
    assert trainer.hooks["progress_bar"].refresh == 0.5


def offer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers a hook."""
    info = folder / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nshiny = offering_package.hooks:Shiny\n")
    package = folder / "offering_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text(
        "from hookline import Hook\nclass Shiny(Hook):\n    def __init__(self, n: int = 1): self.n = n\n"
    )
    monkeypatch.syspath_prepend(str(folder))


def test_an_installed_package_offers_hooks_by_name_which_are_never_on_by_themselves(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, monkeypatch)
    trainer, _ = trainer_of(project)
    assert trainer.hooks.list_hooks() == []
    assert "offering_package" not in sys.modules
    trainer, _ = trainer_of(project, f'{BASIC}[hooks.mine]\nclass_path = "shiny"\nn = 4\n')
    assert trainer.hooks["mine"].n == 4
    trainer, _ = trainer_of(project, f'{BASIC}[hooks.mine]\nclass_path = "offering_package.hooks.Shiny"\n')
    assert trainer.hooks["mine"].n == 1


def test_loggers_strategy_optimizer_schedule_and_own_values(project: Path) -> None:
    text = """
module = "parts_here.Net"
datamodule = {class_path = "parts_here.Data", batches = 2}
loggers.first = {class_path = "parts_here.Lines", prefix = "x"}
loggers.second = "JSONLines"
[trainer]
max_epochs = 1
enable_progress_bar = false
strategy = "parts_here.Here"
[optimizer]
class_path = "AdamW"
lr = 0.5
betas = [0.8, 0.9]
[lr_scheduler]
class_path = "StepLR"
step_size = 1
interval = "step"
[config]
debug = true
[hooks.second]
class_path = "parts_here.Second"
"""
    trainer, parts = trainer_of(project, text)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert [type(each).__name__ for each in trainer.loggers.members] == ["Lines", "JSONLines"]
    assert type(trainer.strategy).__name__ == "Here"
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1**2)
    assert parts.hooks["second"].config == {"debug": True}


def test_a_plain_module_with_a_loss_and_an_optimizer(project: Path) -> None:
    text = f"""
datamodule = "parts_here.Data"
loggers = false
loss = "parts_here.mean_loss"
optimizer = {{class_path = "torch.optim.SGD", lr = 0.1}}
module = {{class_path = "torch.nn.Linear", in_features = 4, out_features = 2}}
{QUIET}"""
    trainer, parts = trainer_of(project, text)
    trainer.fit(parts.module, datamodule=parts.datamodule, **parts.fit_arguments)
    assert trainer.global_step == 3
    _, parts = trainer_of(project, text, "--loss.class_path", "torch.nn.SmoothL1Loss", "--loss.beta", "2")
    assert isinstance(parts.fit_arguments["loss"], nn.SmoothL1Loss)
    assert parts.fit_arguments["loss"].beta == 2


def test_a_class_path_inside_the_arguments_is_made_too(project: Path) -> None:
    text = f"""{BASIC}[hooks.n]
class_path = "parts_here.Nested"
loss = {{class_path = "torch.nn.HuberLoss", init_args = {{delta = 2.0}}}}
anything = [1, {{a = 2}}]
"""
    _, parts = trainer_of(project, text)
    assert parts.hooks["n"].loss.delta == 2.0
    assert parts.hooks["n"].anything == [1, {"a": 2}]


def test_the_seed_of_the_file_also_decides_the_first_weights(project: Path) -> None:
    weights = []
    for _ in range(2):
        torch.rand(3)
        weights.append(trainer_of(project, BASIC, "--trainer.seed", "5")[1].module.layer.weight)
    assert torch.equal(weights[0], weights[1])


def test_a_mapping_is_a_configuration_too() -> None:
    given = {
        "module": {"class_path": "torch.nn.Linear", "in_features": 1, "out_features": 1},
        "trainer": {"max_epochs": 2},
    }
    parts = load_config(given, ["--trainer.max_epochs=5"]).build()
    assert parts.trainer_arguments["max_epochs"] == 5
    assert given["trainer"]["max_epochs"] == 2


# ---- the switches ------------------------------------------------------------------------------------------------

SWITCHED = {
    "enable_logging_hook": True,
    "enable_gradient_monitor": True,
    "gradient_monitor_config": {
        "log_frequency": 50,
        "log_histogram": True,
        "log_norm": True,
        "param_filter": ["encoder", "decoder"],
        "percentiles": [10, 50, 90],
    },
    "enable_model_checkpoint_hook": True,
    "model_checkpoint_config": {
        "save_top_k": 3,
        "monitor": "val/loss",
        "mode": "min",
        "save_last": True,
        "save_on_train_epoch_end": False,
        "filename": "epoch_{epoch}_loss_{val/loss:.2f}",
        "auto_insert_metric_name": False,
    },
    "enable_early_stopping_hook": True,
    "early_stopping_config": {
        "monitor": "val/loss",
        "patience": 7,
        "mode": "min",
        "min_delta": 0.0001,
        "check_on_train_epoch_end": False,
        "strict": True,
        "verbose": True,
    },
    "enable_lr_monitor": True,
    "lr_monitor_config": {"log_momentum": True, "log_weight_decay": True, "frequency": "epoch"},
    "hook_classes": ["parts_here.Threshold", "parts_here.Second"],
    "hook_configs": {"parts_here.Threshold": {"threshold": 5.0}},
}
IN_ORDER = [
    "Threshold",
    "Second",
    "ConsoleLog",
    "GradientMonitor",
    "ModelCheckpoint",
    "EarlyStopping",
    "LRMonitor",
]


def check_switched(hooks: list[Hook]) -> None:
    assert [type(each).__name__ for each in hooks] == IN_ORDER
    threshold, _, console, gradients, checkpoint, stop, rates = hooks
    assert threshold.threshold == 5.0
    assert isinstance(console, ConsoleLog)
    assert isinstance(gradients, GradientMonitor)
    assert (gradients.log_frequency, gradients.log_histogram, gradients.percentiles) == (
        50,
        True,
        (10, 50, 90),
    )
    assert isinstance(checkpoint, ModelCheckpoint)
    assert (checkpoint.save_top_k, checkpoint.monitor, checkpoint.save_last) == (3, "val/loss", True)
    assert isinstance(stop, EarlyStopping)
    assert (stop.patience, stop.verbose, stop.check_on_train_epoch_end) == (7, True, False)
    assert isinstance(rates, LRMonitor)
    assert (rates.log_momentum, rates.log_weight_decay, rates.frequency) == (True, True, "epoch")


def test_hooks_config_builds_every_hook_it_names_in_order(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    check_switched(HooksConfig(**SWITCHED).build())


def test_the_same_switches_in_a_file_build_the_same_hooks(project: Path) -> None:
    lines = "".join(f"{key} = {_toml(value)}\n" for key, value in SWITCHED.items())
    trainer, parts = trainer_of(project, f"{BASIC}[hooks]\n{lines}")
    check_switched([hook for name, hook in parts.hooks.items() if name != "check_monitors"])
    assert trainer.hooks["early_stopping"].patience == 7
    _, parts = trainer_of(project, f"{BASIC}[hooks]\n{lines}", "--hooks.early_stopping_config.patience", "2")
    assert parts.hooks["early_stopping"].patience == 2


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def test_nothing_is_switched_on_by_default() -> None:
    assert HooksConfig().build() == []


def test_hook_classes_may_be_names_of_hooks() -> None:
    assert [
        type(each).__name__ for each in HooksConfig(hook_classes=["progress_bar", "ProgressBar"]).build()
    ] == ["ProgressBar"] * 2


def test_the_bare_class_name_is_taken_where_it_is_clear(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    (hook,) = HooksConfig(
        hook_classes=["parts_here.Threshold"], hook_configs={"Threshold": {"threshold": 2.0}}
    ).build()
    assert hook.threshold == 2.0


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, None),
        ({"continue_on_hook_error": False}, "raise"),
        ({"continue_on_hook_error": True}, "warn"),
        ({"continue_on_hook_error": True, "log_hook_errors": False}, "disable"),
    ],
)
def test_what_happens_when_a_hook_fails_is_decided_by_its_switches(
    given: dict[str, bool], policy: str | None, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    (hook,) = HooksConfig(hook_classes=["parts_here.Second"], **given).build()
    assert hook.on_error == (policy or "raise")
    (rates,) = HooksConfig(enable_lr_monitor=True, **given).build()
    assert rates.on_error == (policy or LRMonitor.on_error)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"early_stopping_config": {"patience": 3}},
            "would do nothing: set enable_early_stopping_hook to true",
        ),
        ({"log_hook_errors": False}, "needs continue_on_hook_error=True"),
        ({"enable_lr_monitor": "yes"}, "enable_lr_monitor='yes' must be true or false"),
        ({"hook_classes": "a.B"}, "hook_classes='a.B' must be a list of class paths"),
        ({"hook_classes": [3]}, "hook_classes=3 must be a list of class paths as text"),
        (
            {"hook_classes": ["a.B"], "hook_configs": {"a.C": {}}},
            "'a.C' is not in hook_classes. Did you mean 'a.B'",
        ),
        ({"lr_monitor_config": 3}, "lr_monitor_config=3 must be a table"),
    ],
)
def test_switches_that_cannot_be_meant_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("(", r"\(")):
        HooksConfig(**given)


# ---- what is refused ---------------------------------------------------------------------------------------------

HOOK = BASIC + "[hooks.h]\n"
BAD: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # what is wrong: text of the file, the key that is named, what else the message says
    "broken TOML": (BASIC + "[hooks\n", "", ("no valid TOML", "line 7", "[hooks")),
    "text without quotes": ("module = parts_here.Net\n", "", ("no valid TOML", "Text needs quotes")),
    "no module": (QUIET, "module", ("missing", 'module = "model.Net"')),
    "unknown section": (BASIC + "[hoks.h]\n", "hoks", ("Did you mean 'hooks'?", "datamodule")),
    "trainer option at the top": ("max_epochs = 3\n" + BASIC, "max_epochs", ("write trainer.max_epochs",)),
    "hook at the top": (BASIC + "[progress_bar]\n", "progress_bar", ("write hooks.progress_bar",)),
    "misspelt trainer option": (
        BASIC + "max_epoch = 3\n",
        "trainer.max_epoch",
        ("Did you mean 'max_epochs'?", "= 3"),
    ),
    "number as text": (BASIC + 'max_steps = "many"\n', "trainer.max_steps", ('"many"', "a whole number")),
    "fraction of epochs": (BASIC + "min_epochs = 1.5\n", "trainer.min_epochs", ("1.5", "a whole number")),
    "epochs below minus one": (
        BASIC.replace("max_epochs = 1", "max_epochs = -5"),
        "trainer.max_epochs",
        ("-5", "from -1"),
    ),
    "text for a flag": (BASIC + 'deterministic = "perhaps"\n', "trainer.deterministic", ("true or false",)),
    "unknown precision": (
        BASIC + 'precision = "bf61-mixed"\n',
        "trainer.precision",
        ("Did you mean 'bf16-mixed'?",),
    ),
    "unknown device": (BASIC + 'device = "gpuu"\n', "trainer.device", ("is not a device",)),
    "unknown strategy": (BASIC + 'strategy = "sinle"\n', "trainer.strategy", ("Did you mean 'single'?",)),
    "unknown accumulation": (
        BASIC + 'accumulate_by = "token"\n',
        "trainer.accumulate_by",
        ("Did you mean 'tokens'?",),
    ),
    "unknown clipping": (
        BASIC + 'gradient_clip_algorithm = "nrm"\n',
        "trainer.gradient_clip_algorithm",
        ("Did you mean 'norm'?",),
    ),
    "negative clipping": (BASIC + "gradient_clip_val = -1\n", "trainer.gradient_clip_val", ("above 0",)),
    "time that is none": (BASIC + 'max_time = "soon"\n', "trainer.max_time", ("2 hours",)),
    "more epochs at least than at most": (
        BASIC + "min_epochs = 9\n",
        "trainer.min_epochs",
        ("max_epochs=1",),
    ),
    "trainer as a list": (
        "trainer = [3]\n" + BASIC.partition("[trainer]")[0],
        "trainer",
        ("table of options",),
    ),
    "unknown hook name": (
        HOOK + 'class_path = "progres_bar"\n',
        "hooks.h.class_path",
        ("Did you mean 'progress_bar'?",),
    ),
    "hook without a class": (HOOK + "patience = 3\n", "hooks.h", ("class_path is missing",)),
    "misspelt class_path": (
        HOOK + 'clas_path = "parts_here.Second"\n',
        "hooks.h",
        ("'class_path' instead of 'clas_path'",),
    ),
    "misspelt class": (
        HOOK + 'class_path = "parts_here.Treshold"\n',
        "hooks.h.class_path",
        ("Did you mean 'Threshold'?",),
    ),
    "misspelt module": (
        HOOK + 'class_path = "hookline.hoks.Second"\n',
        "hooks.h.class_path",
        ("no module 'hookline.hoks'",),
    ),
    "no dotted name": (HOOK + 'class_path = "parts here"\n', "hooks.h.class_path", ("package.module.Class",)),
    "misspelt parameter": (
        HOOK + f'class_path = "{STOP}"\npatienc = 3\n',
        "hooks.h.patienc",
        ("Did you mean 'patience'?", "= 3"),
    ),
    "misspelt init_args": (
        HOOK + f'class_path = "{STOP}"\ninit_arg = {{}}\n',
        "hooks.h.init_arg",
        ("no parameter 'init_arg'",),
    ),
    "init_args is no table": (
        HOOK + f'class_path = "{STOP}"\ninit_args = 3\n',
        "hooks.h.init_args",
        ("table of arguments",),
    ),
    "the same parameter twice": (
        HOOK + f'class_path = "{STOP}"\npatience = 1\ninit_args = {{patience = 2}}\n',
        "hooks.h.patience",
        ("given twice",),
    ),
    "parameter of the wrong type": (
        HOOK + f'class_path = "{STOP}"\npatience = "three"\n',
        "hooks.h.patience",
        ("a whole number",),
    ),
    "negative patience": (
        HOOK + f'class_path = "{STOP}"\npatience = -1\n',
        "hooks.h.patience",
        ("-1", "from 0"),
    ),
    "unknown mode": (
        HOOK + f'class_path = "{STOP}"\nmode = "mim"\n',
        "hooks.h.mode",
        ("Did you mean 'min'?",),
    ),
    "leaving the folder": (
        HOOK + f'class_path = "{KEEP}"\nfilename = "../../{{epoch}}"\n',
        "hooks.h.filename",
        ("'..'",),
    ),
    "a file from the root": (
        HOOK + f'class_path = "{KEEP}"\nfilename = "/etc/x"\n',
        "hooks.h.filename",
        ("run's directory",),
    ),
    "refused by the class": (
        HOOK + 'class_path = "parts_here.Threshold"\nthreshold = -2.0\n',
        "hooks.h.threshold",
        ("negative",),
    ),
    "refused by the class, which does not say for what": (
        HOOK + 'class_path = "parts_here.Threshold"\ntags = []\n',
        "hooks.h",
        ("tags=[] must not be empty",),
    ),
    "module as a hook": (
        HOOK + 'class_path = "parts_here.Net"\n',
        "hooks.h.class_path",
        ("subclass of hookline.Hook",),
    ),
    "function as a hook": (
        HOOK + 'class_path = "parts_here.not_a_class"\n',
        "hooks.h.class_path",
        ("not a class",),
    ),
    "abstract hook": (HOOK + 'class_path = "parts_here.Abstract"\n', "hooks.h.class_path", ("abstract",)),
    "hook as a module": (
        BASIC.replace("parts_here.Net", "parts_here.Second"),
        "module.class_path",
        ("subclass of torch.nn.Module",),
    ),
    "hook as a logger": (
        BASIC.replace("loggers = false", 'loggers = ["parts_here.Second"]'),
        "loggers.second.class_path",
        ("subclass of hookline.Logger",),
    ),
    "module as data": (
        BASIC.replace("parts_here.Data", "parts_here.Net"),
        "datamodule.class_path",
        ("hookline.DataModule",),
    ),
    "event that does not exist": (
        HOOK + 'class_path = "parts_here.Typo"\n',
        "hooks.h",
        ("on_step_ned", "Did you mean 'on_step_end'?"),
    ),
    "unknown error policy": (
        HOOK + 'class_path = "parts_here.Second"\non_error = "ignore"\n',
        "hooks.h",
        ("'warn'",),
    ),
    "enabled is no flag": (
        HOOK + 'class_path = "parts_here.Second"\nenabled = "x"\n',
        "hooks.h.enabled",
        ("true or false",),
    ),
    "hook as a number": (BASIC + "[hooks]\nh = 3\n", "hooks.h", ("class path", "= 3")),
    "misspelt switch": (
        BASIC + "[hooks]\nenable_early_stoping_hook = true\n",
        "hooks.enable_early_stoping_hook",
        ("Did you mean 'enable_early_stopping_hook'?",),
    ),
    "misspelt parameter under a switch": (
        BASIC + "[hooks]\nenable_lr_monitor = true\nlr_monitor_config = {frequenzy = 'step'}\n",
        "hooks.lr_monitor_config.frequenzy",
        ("Did you mean 'frequency'?",),
    ),
    "switch that would do nothing": (
        BASIC + "[hooks]\nlr_monitor_config = {frequency = 'step'}\n",
        "hooks.lr_monitor_config",
        ("enable_lr_monitor",),
    ),
    "missing parameter": (
        BASIC.replace("parts_here.Net", "parts_here.Needy"),
        "module",
        ("needs classes", "module.classes"),
    ),
    "missing parameter without a type": (
        HOOK + 'class_path = "parts_here.Untyped"\n',
        "hooks.h",
        ("Untyped needs url", "hooks.h.url"),
    ),
    "misspelt module beside the file": (
        BASIC.replace("parts_here.Net", "part_here.Net"),
        "module.class_path",
        ("may not be imported", "Did you mean 'parts_here.Net'?"),
    ),
    "misspelt package": (
        BASIC.replace("parts_here.Net", "hokline.demos.BoringModel"),
        "module.class_path",
        ("Did you mean 'hookline.interop.demo.BoringModel'?",),
    ),
    "none of the choices": (
        BASIC.replace('"parts_here.Net"', '{class_path = "parts_here.Net", kind = "deap"}'),
        "module.kind",
        ('"plain" or "deep"', "Did you mean 'deep'?"),
    ),
    "wrong class inside the arguments": (
        BASIC.replace(
            '"parts_here.Net"', '{class_path = "parts_here.Net", act = {class_path = "parts_here.Second"}}'
        ),
        "module.act",
        ("Second",),
    ),
    "unknown optimizer": ('optimizer = "AdmW"\n' + BASIC, "optimizer.class_path", ("Did you mean 'AdamW'?",)),
    "negative learning rate": (
        'optimizer = {class_path = "SGD", lr = -1.0}\n' + BASIC,
        "optimizer",
        ("-1.0",),
    ),
    "misspelt optimizer option": (
        'optimizer = {class_path = "SGD", momentom = 0.9}\n' + BASIC,
        "optimizer.momentom",
        ("Did you mean 'momentum'?",),
    ),
    "schedule without an optimizer": (
        'lr_scheduler = "StepLR"\n' + BASIC,
        "lr_scheduler",
        ("needs an optimizer",),
    ),
    "schedule without its parameter": (
        'optimizer = {class_path = "SGD", lr = 0.1}\nlr_scheduler = "StepLR"\n' + BASIC,
        "lr_scheduler",
        ("needs step_size",),
    ),
    "unknown interval": (
        'optimizer = {class_path = "SGD", lr = 0.1}\n'
        'lr_scheduler = {class_path = "StepLR", step_size = 1, interval = "stpe"}\n' + BASIC,
        "lr_scheduler",
        ("interval='stpe'", "'step', 'epoch'"),
    ),
    "loss for a module with steps of its own": (
        'loss = "torch.nn.functional.mse_loss"\n' + BASIC,
        "loss",
        ("plain torch.nn.Module",),
    ),
    "checkpoint that is not there": ('checkpoint = "nowhere"\n' + BASIC, "checkpoint", ("no checkpoint at",)),
    "own values that are no table": ("config = 3\n" + BASIC, "config", ("table",)),
    "two progress bars": (
        BASIC.replace("bar = false", "bar = true") + "[hooks.progress_bar]\n",
        "hooks.progress_bar",
        ("two progress bars",),
    ),
    "a path outside": (
        HOOK + 'class_path = "wave.Wave_read"\n',
        "hooks.h.class_path",
        ("may not be imported", "--allow wave"),
    ),
    "a path outside, deep inside": (
        HOOK + 'class_path = "parts_here.Nested"\nloss = {class_path = "colorsys.x"}\n',
        "hooks.h.loss",
        ("may not be imported",),
    ),
    "a file that allows commands": ('allow = ["subprocess"]\n' + BASIC, "allow", ("--allow subprocess",)),
    "allow is no list": ("allow = 3\n" + BASIC, "allow", ("list of packages",)),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_configuration_is_refused_before_the_first_step(what: str, project: Path) -> None:
    text, key, said = BAD[what]
    with pytest.raises(ConfigError) as caught:
        trainer_of(project, text)
    message = str(caught.value)
    assert "run.toml" in message
    assert caught.value.key == key
    assert key in message
    for each in said:
        assert each in message, message
    assert "Traceback" not in message
    assert len(message) < 1500
    assert not list(project.glob("runs"))


def test_there_are_enough_bad_configurations() -> None:
    assert len(BAD) >= 40


@pytest.mark.parametrize(
    ("typed", "key", "said"),
    [
        (["--trainer.max_epocs", "3"], "trainer.max_epocs", "Did you mean 'max_epochs'?"),
        (["--hooks.stp.patience", "3"], "hooks.stp", "no hook of this name"),
        (["--hooks.stop.patience", "many"], "hooks.stop.patience", "a whole number"),
        (["--hooks.stop.patience.deep", "1"], "hooks.stop.patience", "no key below it"),
        (["--modle.width", "3"], "modle", "Did you mean 'module'?"),
    ],
)
def test_a_wrong_override_is_refused_with_the_option_that_was_typed(
    project: Path, typed: list[str], key: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_of(project, f'{BASIC}[hooks.stop]\nclass_path = "{STOP}"\npatience = 2\n', *typed)
    assert caught.value.key == key
    assert said in str(caught.value)
    assert typed[0] in str(caught.value)


@pytest.mark.parametrize("monitor", ["val/los", "vall/loss"])
def test_a_misspelt_loss_is_refused_when_the_hook_is_made(project: Path, monitor: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: hooks.stop.monitor.*Did you mean 'val/loss'"):
        trainer_of(project, f'{BASIC}[hooks.stop]\nclass_path = "{STOP}"\nmonitor = "{monitor}"\n')


@pytest.mark.parametrize("monitor", ["val_loss", "val-loss"])
def test_a_metric_that_nobody_logs_is_refused_before_the_first_step(project: Path, monitor: str) -> None:
    trainer, parts = trainer_of(
        project, f'{BASIC}[hooks.stop]\nclass_path = "{STOP}"\nmonitor = "{monitor}"\n'
    )
    with pytest.raises(ConfigError, match="hooks.stop.monitor.*Did you mean 'val/loss'") as caught:
        trainer.fit(parts.module, datamodule=parts.datamodule)
    assert "run.toml" in str(caught.value)
    assert trainer.global_step == trainer.state.batches_seen == 0


def test_a_metric_of_training_is_not_missed_before_training(project: Path) -> None:
    trainer, parts = trainer_of(
        project,
        f'{BASIC}[hooks.stop]\nclass_path = "{STOP}"\nmonitor = "train/loss"\ncheck_on_train_epoch_end = true\n',
    )
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert trainer.status == "completed"


def test_what_breaks_in_a_users_class_keeps_its_own_error(project: Path) -> None:
    (project / "parts_here_broken.py").write_text(
        "from hookline import Hook\nclass Bad(Hook):\n    def __init__(self): self.nothing.more\n"
    )
    with pytest.raises(AttributeError) as caught:
        trainer_of(project, f'{BASIC}[hooks.h]\nclass_path = "parts_here_broken.Bad"\n')
    assert "hooks.h" in caught.value.__notes__[0]


def test_a_module_that_needs_another_one_says_which(project: Path) -> None:
    (project / "parts_here_needing.py").write_text("import surely_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed") as caught:
        trainer_of(project, f'{BASIC}[hooks.h]\nclass_path = "parts_here_needing.Bad"\n')
    assert "hooks.h.class_path of" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "lines",
    [
        'url = "https://hooks.example/T0P-S3CRET"\ntimout = 3\n',
        'url = ["https://hooks.example/T0P-S3CRET"]\n',
        'clas_path = "x"\nurl = "https://hooks.example/T0P-S3CRET"\n',
        'url = "https://hooks.example/T0P-S3CRET"\ntimeout = -1\n',
        'url = "T0P-S3CRET"\n',
    ],
)
def test_a_secret_is_never_in_an_error(project: Path, lines: str) -> None:
    path = "" if "clas_path" in lines else 'class_path = "hookline.hooks.webhook.Webhook"\n'
    with pytest.raises(ConfigError) as caught:
        trainer_of(project, f"{BASIC}[hooks.h]\n{path}{lines}")
    assert "S3CRET" not in str(caught.value) + json.dumps(caught.value.data())


# ---- files -------------------------------------------------------------------------------------------------------


def test_a_missing_file_names_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    with pytest.raises(ConfigError, match=r"no such file. In its folder: run.toml"):
        read(tmp_path / "rum.toml")


@pytest.mark.parametrize("name", ["run.json", "run", "folder"])
def test_only_toml_and_yaml_are_configurations(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"ends in .toml, .yaml, .yml"):
        read(tmp_path / name)


def test_a_configuration_is_never_taken_from_a_checkpoint(project: Path, tmp_path: Path) -> None:
    trainer, parts = trainer_of(project)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    trainer.save_checkpoint(tmp_path / "kept")
    with pytest.raises(ConfigError, match="never taken from a checkpoint"):
        load_config(tmp_path / "kept")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n", "no valid YAML"),
        ("module: x\nmodule: y\n", "module: this key is there 2 times; the last is in line 2"),
        ("trainer:\n  max_epochs: 1\n  max_epochs: 2\n", "max_epochs: this key is there 2 times"),
        ("- 1\n", "table of keys"),
        ("hooks:\n  on: {}\n", "put it in quotes"),
        ("!!python/object/apply:os.system ['true']\n", "no valid YAML"),
    ],
)
def test_bad_yaml_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(tmp_path / "run.yaml")


def test_overrides_are_told_from_other_arguments() -> None:
    given = [
        "fit",
        "run.toml",
        "--trainer.max_epochs",
        "-1",
        "--a.b=x=y",
        "--json",
        "--trainer.deterministic",
        "--",
        "--c.d",
    ]
    pairs, rest = split_overrides(given)
    assert pairs == [("trainer.max_epochs", "-1"), ("a.b", "x=y"), ("trainer.deterministic", "true")]
    assert rest == ["fit", "run.toml", "--json", "--", "--c.d"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("None", None),
        ("[1, x]", [1, "x"]),
        ("00:01:00:00", "00:01:00:00"),
        ("text", "text"),
        ("[broken", "[broken"),
    ],
)
def test_what_a_typed_value_means(typed: str, meant: Any) -> None:
    assert Override(typed).guess == meant


def test_types_are_spelled_in_words() -> None:
    assert spelled(int | None) == "a whole number or nothing (null)"
    assert spelled(list[str]) == "a list of text"
    assert spelled(dict[str, int]) == "a table"
    assert spelled(nn.Module).startswith("a Module")
    assert spelled(bool | None) == "true, false or nothing (null)"
    assert spelled(str | list[float] | None) == "text, a list of numbers or nothing (null)"
    assert spelled(list[nn.Module]) == "a list of Modules (a table with class_path and init_args)"
    assert spelled(Literal["a", "b"] | int) == '"a", "b" or a whole number'
    for anything in (Any, object, int | Any, dict[str, Any] | Any | None):
        assert spelled(anything) == "anything"


@pytest.mark.parametrize(
    "cls",
    [*map(hook_class, BUILTIN_HOOKS), *LOGGERS, TrainerSettings, DDP, FSDP, Accelerated],
    ids=lambda cls: cls.__name__,
)
def test_every_parameter_of_what_hookline_brings_has_a_type_in_words(cls: type) -> None:
    words = {name: spelled(hint) for name in parameters(cls) if (hint := annotation(cls, name)) is not None}
    assert words or cls is DDP
    for name, text in words.items():
        assert not re.search(r"\bAny\b|typing|<|\[|collections|'>|\ba [AEIOU]", text), f"{name}: {text}"
        assert "class_path" not in text or re.search(r"(Logger|Module|Accelerator) \(a table", text), (
            f"{name}: {text}"
        )


# ---- where class paths may import from ---------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed module, not beside the configuration, that leaves a mark when it is imported."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    mark = folder / "imported"
    (folder / "stranger.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom hookline import Hook\nfrom torch import nn\n"
        "class Seen(Hook): pass\nclass Loss(nn.Module): pass\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    return mark


@pytest.mark.parametrize(
    "text",
    [
        f'{BASIC}[hooks.h]\nclass_path = "stranger.Seen"\n',
        f'hooks = ["stranger.Seen"]\n{BASIC}',
        f'{BASIC}[hooks]\nhook_classes = ["stranger.Seen"]\n',
        BASIC.replace("parts_here.Net", "stranger.Loss"),
        f'{BASIC}[hooks.h]\nclass_path = "parts_here.Nested"\nloss = {{class_path = "stranger.Loss"}}\n',
        f'{BASIC}[hooks.h]\nclass_path = "parts_here.Nested"\nloss = "stranger.Loss"\n',
        f'{BASIC}[hooks.h]\nclass_path = "parts_here.Nested"\nloss = {{class_path = "torch.nn.MSELoss"}}\nanything = {{class_path = "stranger.Loss"}}\n',
        f'loss = "stranger.Loss"\n{BASIC}',
        f'optimizer = "stranger.Loss"\n{BASIC}',
    ],
)
def test_a_path_that_is_not_allowed_is_not_imported(project: Path, outside: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="not be imported"):
        trainer_of(project, text)
    assert "stranger" not in sys.modules
    assert not outside.exists()


@pytest.mark.parametrize(
    ("text", "allow"),
    [
        (f"allow = ['stranger']\n{BASIC}", []),
        (BASIC, ["stranger"]),
        (BASIC, ["x,stranger"]),
        (f"{BASIC}[allow]\nmodules = ['stranger']\n", []),
    ],
)
def test_what_the_user_allows_is_imported(project: Path, outside: Path, text: str, allow: list[str]) -> None:
    trainer, _ = trainer_of(project, f'{text}[hooks.h]\nclass_path = "stranger.Seen"\n', allow=allow)
    assert outside.exists()
    assert type(trainer.hooks["h"]).__name__ == "Seen"


def test_the_policy_holds_only_while_a_configuration_is_built(project: Path) -> None:
    from jsonargparse import _common

    before = json.dumps(_common.parsing_settings, default=str)
    trainer_of(project, f'{BASIC}[hooks.h]\nclass_path = "parts_here.Second"\n')
    with pytest.raises(ConfigError):
        trainer_of(project, BAD["a path outside, deep inside"][0])
    assert json.dumps(_common.parsing_settings, default=str) == before


def test_the_folder_does_not_lend_its_files_the_names_of_others(tmp_path: Path) -> None:
    for name in ("os", "yaml"):
        (tmp_path / f"{name}.py").touch()
    permissions = Permissions(tmp_path)
    import yaml  # noqa: F401

    assert "may not be imported" in permissions.refusal("os.system")
    assert "another module of that name is loaded" in permissions.refusal("yaml.load")
    assert "may not be imported" in Permissions(None).refusal("yaml.load")


def test_a_name_cannot_slip_past_by_its_beginning() -> None:
    permissions = Permissions(None, ["good"])
    assert permissions.refusal("good.Hook") == ""
    assert permissions.refusal("goodness.Hook") != ""
    assert permissions.refusal("torch.hub.load") != ""


@pytest.mark.parametrize("name", ["jsonargparse", "a b", "../x"])
def test_allow_takes_packages(project: Path, name: str) -> None:
    with pytest.raises(HooklineError, match="name of a package or module"):
        config_of(project, BASIC, allow=[name])


# ---- the schema --------------------------------------------------------------------------------------------------


def test_the_schema_knows_every_section_option_and_built_in_hook(project: Path) -> None:
    described = json.loads(json.dumps(schema()))
    assert set(described["properties"]) == set(SECTIONS)
    assert set(described["properties"]["trainer"]["properties"]) == set(option_names())
    trainer = described["properties"]["trainer"]["properties"]
    assert trainer["max_steps"] == {
        "type": "integer",
        "minimum": -1,
        "default": -1,
        "description": "Number of optimizer updates. -1: no limit.",
    }
    assert trainer["nonfinite"]["enum"] == ["stop", "skip"] and trainer["accounting"]["type"] == "boolean"
    assert all(each["description"] for each in trainer.values())
    assert described["additionalProperties"] is False
    hooks = described["properties"]["hooks"]["anyOf"][1]["properties"]
    assert {"progress_bar", "hook_classes", "enable_lr_monitor"} <= set(hooks)
    bar = hooks["progress_bar"]["anyOf"][1]["properties"]
    assert bar["refresh"]["type"] == bar["init_args"]["properties"]["refresh"]["type"] == "number"


@pytest.mark.parametrize(
    ("hint", "described"),
    [
        (int | None, {"type": ["integer", "null"]}),
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (dict[str, int], {"type": "object"}),
        (Literal["a", "b"], {"enum": ["a", "b"]}),
        (Any, {}),
        (None, {}),
        (
            Sequence[float] | str,
            {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]},
        ),
        (Callable[..., Any], {"type": ["string", "object"]}),
    ],
)
def test_types_as_schemas(hint: Any, described: dict[str, Any]) -> None:
    assert of_type(hint) == described
    assert "class_path" in json.dumps(of_type(nn.Module))


def test_every_section_says_what_it_is_for() -> None:
    assert all(each.get("description") for each in schema()["properties"].values())


def test_a_bare_name_that_fits_two_classes_is_refused_with_both() -> None:
    with pytest.raises(OptionError, match=r"fits several of hook_classes \(a.x.H, b.y.H\)"):
        HooksConfig(hook_classes=["a.x.H", "b.y.H"], hook_configs={"H": {}})


# ---- several loaders ---------------------------------------------------------------------------------------------

MIXED = BASIC.replace("parts_here.Data", "parts_here.Several")


def test_a_section_says_how_loaders_are_mixed(project: Path) -> None:
    mixture = '[mixture]\norder = "weighted"\nepoch_length = 4\nweights = {web = 3, code = 1}\n'
    trainer, parts = trainer_of(project, MIXED + mixture, "--mixture.epoch_length=8")
    trainer.fit(parts.module, datamodule=parts.datamodule, **parts.fit_arguments)
    assert trainer.global_step == 8
    assert trainer.loaders.batches_drawn == {"web": 6, "code": 2}


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ('order = "wieghted"', "mixture.order", "Did you mean 'weighted'"),
        ('ordr = "weighted"', "mixture.ordr", "Did you mean 'order'"),
        ("weights = {web = -1}", "mixture", "the weight of 'web' is -1"),
    ],
)
def test_a_wrong_mixture_is_refused_with_its_key(project: Path, text: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(project, f"{MIXED}[mixture]\n{text}\n").build()
    assert refused.value.data()["key"] == key
    assert said in str(refused.value)


def test_the_page_on_configuration_names_every_section() -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [
        name
        for name in SECTIONS
        if f"| `{name}` |" not in page and f", `{name}` |" not in page and f"| `{name}`, " not in page
    ] == []


# ---- files that are made to exhaust the machine ------------------------------------------------------------------


def bomb(kind: str, levels: int = 30) -> str:
    """Nine of the level below at every level."""
    made = ["config:", "  a0: &a0 [x]" if kind == "list" else "  a0: &a0 {x: 1}"]
    for level in range(1, levels):
        inner = ", ".join(
            f"*a{level - 1}" if kind == "list" else f"k{each}: *a{level - 1}" for each in range(9)
        )
        made.append(f"  a{level}: &a{level} " + (f"[{inner}]" if kind == "list" else f"{{{inner}}}"))
    return "\n".join(made)


HUGE = {
    "aliases of lists": ("yaml", bomb("list"), "100000 values"),
    "aliases of tables": ("yaml", bomb("table"), "100000 values"),
    "merged tables": ("yaml", bomb("table").replace("k0: *", "<<: *"), "100000 values"),
    "an alias of itself": ("yaml", "config: &a {b: *a}", "part of"),
    "a list in itself": ("yaml", "config: &a [*a]", "part of"),
    "many aliases": ("yaml", "config:\n  x: &x 1\n  y: [" + "*x, " * 2000 + "]", "1000 aliases"),
    "deep lists": ("yaml", "config: " + "[" * 3000 + "]" * 3000, "50 levels"),
    "deep tables": (
        "yaml",
        "config:\n" + "".join(" " * (each + 1) + f"k{each}:\n" for each in range(500)),
        "50 levels",
    ),
    "deep lists in TOML": ("toml", "config.x = " + "[" * 3000 + "]" * 3000, "50 levels"),
    "less deep lists in TOML": ("toml", "config.x = " + "[" * 100 + "]" * 100, "50 levels"),
    "deep tables in TOML": ("toml", "config." + ".".join("a" * 3000) + " = 1", "50 levels"),
    "very deep tables in TOML": ("toml", "a" + " .a" * 20_000 + " = 1", "50 levels"),
    "a deep header": ("toml", "[a" + '."a"' * 20_000 + "]", "50 levels"),
    "a deep key in a table": ("toml", "config.x = {a" + ".a" * 20_000 + " = 1}", "50 levels"),
    "a long number": ("yaml", "config: {x: " + "9" * 500_000 + "}", "1000 digits"),
    "in TOML": ("toml", "config.x = " + "9" * 5000, "1000 digits"),
    "a long number that is tagged": ("yaml", 'config: {x: !!int "' + "9" * 5000 + '"}', "1000 digits"),
    "a long hexadecimal number": ("yaml", "config: {x: 0x" + "f" * 500_000 + "}", "1000 digits"),
    "so in TOML": ("toml", "config.x = 0x" + "f" * 50_000, "1000 digits"),
    "a number in base 60": ("yaml", "config: {x: " + ":".join(["59"] * 100_000) + "}", "1000 digits"),
    "megabytes": ("yaml", "config:\n" + "".join(f"  k{each}: 1\n" for each in range(150_000)), "1 MB"),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_file_that_would_exhaust_the_machine_is_refused_at_once(name: str, tmp_path: Path) -> None:
    suffix, text, said = HUGE[name]
    (tmp_path / f"run.{suffix}").write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / f"run.{suffix}")
    assert time.process_time() - began < 20  # it was hours


def test_what_is_typed_has_the_same_limits() -> None:
    typed = "[" + bomb("list").partition("\n")[2].replace("\n", ", ").replace("  a", "a") + "]"
    for text in (typed, "[" * 3000, "[" * 3000 + "]" * 3000, '{"a": ' * 3000):
        began = time.process_time()
        assert (
            load_config({}, [f"--config.x={text}"]).values["config"]["x"] == text
        )  # it is text, and stays so
        assert time.process_time() - began < 20
    with pytest.raises(ConfigError, match="levels|no valid YAML"):
        load_config({}, ["--module=" + '{"a": ' * 3000 + "1" + "}" * 3000])


def test_long_texts_of_digits_and_dots_are_fine(tmp_path: Path) -> None:
    digits, dots = "1" * 5000, "One. " * 200
    (tmp_path / "run.yaml").write_text(f"config: {{x: '{digits}', y: {dots}}}")
    assert load_config(tmp_path / "run.yaml").values["config"] == {"x": digits, "y": dots.strip()}
    (tmp_path / "run.toml").write_text(f'# {dots}\nconfig.x = "{digits}"\nconfig.y = "{dots}"\n')
    assert load_config(tmp_path / "run.toml").values["config"] == {"x": digits, "y": dots}


def test_aliases_as_people_use_them_and_many_keys_are_fine(tmp_path: Path) -> None:
    shared = "".join(f"    k{each}: {each}\n" for each in range(500))
    used = "".join(f"    u{each}: {{<<: *shared, own: {each}}}\n" for each in range(50))
    (tmp_path / "run.yaml").write_text(f"config:\n  shared: &shared\n{shared}  all:\n{used}")
    values = load_config(tmp_path / "run.yaml").values["config"]
    assert values["all"]["u49"]["k499"] == 499 and values["all"]["u49"]["own"] == 49
