"""Configurations: what they make, what they refuse and how, and what they may import."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from config.configured import BASIC, KEEP, QUIET, STOP, config_of, trainer_of

from hookline import HooklineError, Trainer
from hookline.config import ConfigError, load_config

# ---- what a configuration makes ----------------------------------------------------------------------------------


def test_a_file_becomes_a_run(project: Path) -> None:
    trainer, parts = trainer_of(
        project, BASIC + '[hooks.stop]\nclass_path = "parts_here.Threshold"\nthreshold = 3\n'
    )
    trainer.fit(parts.module, datamodule=parts.datamodule, **parts.fit_arguments)
    assert trainer.status == "completed"
    assert trainer.global_step == 3
    assert trainer.hooks["stop"].threshold == 3.0


@pytest.mark.parametrize(
    ("overrides", "kind"), [("--trainer.max_epochs=2", "str"), ({"trainer": {}}, "dict")]
)
def test_overrides_are_a_list_of_strings(overrides: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf'takes a list of strings such as \["--trainer.*, not a {kind}\.'):
        load_config({"trainer": {"max_epochs": 1}}, overrides)
    load_config({"trainer": {"max_epochs": 1}}, ["--trainer.max_epochs=2"])


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


def test_checkpoints_of_trainable_weights_are_asked_for_in_a_file(project: Path) -> None:
    text = f'{BASIC}[hooks.keep]\nclass_path = "{KEEP}"\nweights = "trainable"\n'
    trainer, parts = trainer_of(project, text, "--trainer.checkpoint.weights=trainable")
    assert trainer.options.saving.weights == parts.hooks["keep"].weights == "trainable"
    for setting in ("--trainer.checkpoint.weights=frozen", "--hooks.keep.weights=frozen"):
        with pytest.raises(HooklineError, match="weights.*frozen") as refused:
            trainer_of(project, text, setting)
        assert "trainable" in str(refused.value)


@pytest.mark.parametrize(("typed", "value"), [("[a, b]", ["a", "b"]), ('["a"]', ["a"]), ("null", None)])
def test_the_command_line_gives_lists_and_null(project: Path, typed: str, value: Any) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Threshold"\n'
    assert trainer_of(project, text, f"--hooks.one.tags={typed}")[1].hooks["one"].tags == value


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


# ---- what is refused ---------------------------------------------------------------------------------------------

HOOK = BASIC + "[hooks.h]\n"
BAD: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # what is wrong: text of the file, the key that is named, what else the message says
    "broken TOML": (BASIC + "[hooks\n", "", ("not valid TOML", "line 7", "[hooks")),
    "text without quotes": ("module = parts_here.Net\n", "", ("not valid TOML", "Text needs quotes")),
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
        ("Did you mean 'hookline.demos.BoringModel'?",),
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
def test_a_metric_that_is_never_logged_is_refused_before_the_first_step(project: Path, monitor: str) -> None:
    trainer, parts = trainer_of(
        project, f'{BASIC}[hooks.stop]\nclass_path = "{STOP}"\nmonitor = "{monitor}"\n'
    )
    with pytest.raises(ConfigError, match="hooks.stop.monitor.*Did you mean 'val/loss'") as caught:
        trainer.fit(parts.module, datamodule=parts.datamodule)
    assert "run.toml" in str(caught.value)
    assert trainer.global_step == trainer.state.batches_seen == 0


def test_the_hook_that_checks_monitors_is_not_shown_as_one_of_the_user(project: Path) -> None:
    text = f'{BASIC}[hooks.stop]\nclass_path = "{STOP}"\nmonitor = "val/loss"\n'
    trainer, parts = trainer_of(project, text, "--trainer.run_dir", str(project / "run"))
    assert "check_monitors" in parts.hooks
    assert "check_monitors" not in str(trainer.explain(parts.module, datamodule=parts.datamodule))
    trainer.fit(parts.module, datamodule=parts.datamodule)
    record = json.loads((project / "run" / "run.json").read_text())
    assert "stop" in record["hooks"] and "check_monitors" not in record["hooks"]
    assert {each.hook for each in trainer.hooks.cost()} == {"stop"}


def test_a_metric_of_training_is_not_missed_before_training(project: Path) -> None:
    trainer, parts = trainer_of(
        project,
        f'{BASIC}[hooks.stop]\nclass_path = "{STOP}"\nmonitor = "train/loss"\ncheck_on_train_epoch_end = true\n',
    )
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert trainer.status == "completed"


# ---- files -------------------------------------------------------------------------------------------------------


def test_a_configuration_is_never_taken_from_a_checkpoint(project: Path, tmp_path: Path) -> None:
    trainer, parts = trainer_of(project)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    trainer.save_checkpoint(tmp_path / "kept")
    with pytest.raises(ConfigError, match="never taken from a checkpoint"):
        load_config(tmp_path / "kept")


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


@pytest.mark.parametrize("name", ["jsonargparse", "a b", "../x"])
def test_allow_takes_packages(project: Path, name: str) -> None:
    with pytest.raises(HooklineError, match="name of a package or module"):
        config_of(project, BASIC, allow=[name])


# ---- all problems together ------------------------------------------------------------------------------------------


def test_one_error_names_all_problems_of_the_command_line_and_of_the_file(project: Path) -> None:
    file = BASIC + '[hooks.stop]\nclass_path = "parts_here.Threshold"\nthreshhold = 3\n'
    typed = ["--trainer.max_epoch=3", "--trainer.lr=abc", "--trainer.max_steps=x", "--module.widht=2"]
    config = config_of(project, file, *typed)
    with pytest.raises(ConfigError, match="the configuration has 5 problems:") as refused:
        config.build()
    keys = [each.key for each in refused.value.problems]
    assert keys == [
        "trainer.max_epoch",
        "trainer.lr",
        "trainer.max_steps",
        "hooks.stop.threshhold",
        "module.widht",
    ]
    lines = str(refused.value).splitlines()[1:]
    assert [each.split(": ")[1].partition(" = ")[0] for each in lines] == keys
    assert "with --trainer.max_epoch: " in lines[0] and "Did you mean 'max_epochs'?" in lines[0]
    assert [each["key"] for each in refused.value.data()["problems"]] == keys


def test_one_error_names_unknown_sections_and_hooks_and_options(project: Path) -> None:
    typed = ["--trainr.max_epochs=3", "--hooks.nothing=3", "--hooks.else.patience=3", "--trainer.lr=1"]
    with pytest.raises(ConfigError) as refused:
        config_of(project, BASIC, *typed)
    assert {each.key for each in refused.value.problems} == {
        "trainr",
        "hooks.nothing",
        "hooks.else",
        "trainer.lr",
    }


def test_a_hook_that_is_not_there_and_several_wrong_values_hide_no_problem(project: Path) -> None:
    typed = ["--hooks.else.patience=3", "--module.widht=2", "--trainer.max_epochs=-3"]
    with pytest.raises(ConfigError, match="has 4 problems") as refused:
        config_of(project, BASIC, *typed, "--trainer.precision=bf17")
    keys = [each.key for each in refused.value.problems]
    assert keys == ["hooks.else", "trainer.max_epochs", "trainer.precision", "module.widht"]


def test_parts_are_not_made_if_there_is_a_problem(project: Path) -> None:
    config = config_of(
        project, BASIC + '[hooks.stop]\nclass_path = "parts_here.Threshold"\n', "--trainer.lr=1"
    )
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for each in ("hooks", "sections"):
            module = importlib.import_module(f"hookline.config.{each}")
            patch.setattr(module, "make_part", lambda source, part, *given: made.append(part.key))
        with pytest.raises(ConfigError, match="no such option"):
            config.build()
    assert made == []


def test_a_wrong_hook_hides_no_problem_of_the_others_and_code_of_the_user_is_not_run(project: Path) -> None:
    file = BASIC.replace("loggers = false\n", "") + (
        '[hooks.stop]\nclass_path = "EarlyStopping"\nmonitor = "val/loss"\n'
        '[hooks.best]\nclass_path = "ModelCheckpoint"\n[hooks.ema]\nclass_path = "WeightAveraging"\n'
        '[loggers.table]\nclass_path = "CSV"\n'
    )
    typed = ["--hooks.stop.patience=many", "--hooks.bset.monitor=val/loss", "--trainer.max_epochs.x=1"]
    with pytest.raises(ConfigError) as refused:
        config_of(project, file, *typed)
    assert [each.key for each in refused.value.problems] == [
        "trainer.max_epochs",
        "hooks.bset",
        "hooks.stop.patience",
    ]
    config = config_of(
        project, file, "--loggers.table.name=/x", "--hooks.best.save_top_k=none", "--hooks.ema.decay=3"
    )
    with pytest.raises(ConfigError) as refused:  # values that only the constructors check
        config.build()
    assert [each.key for each in refused.value.problems] == [
        "loggers.table.name",
        "hooks.best.save_top_k",
        "hooks.ema.decay",
    ]
