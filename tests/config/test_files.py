"""Configuration files and overrides: what is read, what is laid over it, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from config.typed import HEAD, HOOK, PARTS, build, refused

from hookline import Trainer
from hookline.config import ConfigError, load_config
from hookline.config.files import read_config, split_overrides
from hookline.config.problems import Override, has_secret


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module beside the configurations, which nothing but the configuration makes importable."""
    (tmp_path / "typed_here.py").write_text(PARTS)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("typed_here", None)


# ---- tables on the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed",
    [
        '{"class_path": "typed_here.Net", "init_args": {"width": 9}}',
        '{"class_path": "typed_here.Net", "width": 9}',
        "{class_path: typed_here.Net, init_args: {width: 9}}",
        '{"width": 9}',
        '{"init_args": {"width": 9}}',
    ],
)
def test_the_module_as_a_table(project: Path, typed: str) -> None:
    assert build(project, "", f"--module={typed}").module.width == 9
    assert build(project, "", "--module", typed, "--module.width", "10").module.width == 10


def test_another_class_does_not_inherit_the_arguments_of_the_one_before(project: Path) -> None:
    module = build(project, "", '--module={"class_path": "typed_here.Other"}').module
    assert (type(module).__name__, module.width) == ("Other", 4)


@pytest.mark.parametrize(
    "typed",
    [
        '--hooks.one={"threshold": 7, "note": "3"}',
        '--hooks.one.init_args={"threshold": 7, "note": "3"}',
        "--hooks.one.init_args={threshold: 7e0, note: '3'}",
        '--hooks.one={"init_args": {"threshold": 7, "note": "3"}}',
    ],
)
@pytest.mark.parametrize(
    "written", [HOOK, HOOK.replace("threshold = 3.0\ntags", "init_args.threshold = 3.0\ninit_args.tags")]
)
def test_a_hook_as_a_table_keeps_what_the_table_does_not_name(
    project: Path, typed: str, written: str
) -> None:
    hook = build(project, written, typed).hooks["one"]
    assert (hook.threshold, hook.note, hook.tags, hook.on_error) == (7.0, "3", ["a"], "warn")


def test_a_hook_of_a_list_and_one_that_was_not_there(project: Path) -> None:
    (project / "list.yaml").write_text("module: typed_here.Net\nhooks: [typed_here.Threshold]\n")
    typed = [
        '--hooks.threshold={"threshold": 2}',
        '--hooks.new={"class_path": "early_stopping", "patience": 9}',
    ]
    hooks = load_config(project / "list.yaml", typed).build().hooks
    assert hooks["threshold"].threshold == 2.0
    assert hooks["new"].patience == 9


def test_other_parts_as_tables(project: Path) -> None:
    parts = build(
        project,
        "",
        '--datamodule={"class_path": "typed_here.Data", "batches": 1}',
        '--trainer={"max_epochs": 4}',
        "--optimizer={class_path: AdamW, lr: 1e-3}",
        '--lr_scheduler={"class_path": "StepLR", "step_size": 1, "interval": "step"}',
        '--loggers.mine={"class_path": "typed_here.Lines", "init_args": {"digits": 5}}',
        '--module.act={"class_path": "torch.nn.LeakyReLU", "negative_slope": 0.5}',
        '--config={"a": {"b": 1}}',
    )
    trainer = parts.make_trainer(Trainer)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert trainer.global_step == 4 and trainer.options.enable_progress_bar is False
    assert type(trainer.optimizers[0]).__name__ == "AdamW"
    assert trainer.loggers.members[0].digits == 5
    assert parts.module.act.negative_slope == 0.5
    assert parts.trainer_arguments["config"] == {"a": {"b": 1}}


def test_a_section_is_taken_out_by_null(project: Path) -> None:
    assert build(project, "", "--datamodule=null").datamodule is None
    assert "this section is missing" in str(refused(project, "", "--module=null"))


@pytest.mark.parametrize(
    ("typed", "key", "said"),
    [
        ('--module={"class_path": "typed_here.Net", "widht": 3}', "module.widht", "Did you mean 'width'?"),
        ('--module={"width": "wide"}', "module.width", "width must be a whole number"),
        ('--module={"class_path": "os.system"}', "module.class_path", "may not be imported"),
        (
            '--hooks.one.init_args={"treshold": 3}',
            "hooks.one.init_args.treshold",
            "Did you mean 'threshold'?",
        ),
        ('--hooks.one={"threshold": 3, "threshold": 4}', "hooks.one.threshold", "this key is there 2 times"),
        ("--hooks.one={threshold: 3, threshold: 4}", "threshold", "this key is there 2 times"),
        ('--hooks.two={"threshold": 3}', "hooks.two", "class_path is missing"),
        ("--hooks.two={}", "hooks.two", "class_path is missing"),
        ("--hooks.one.init_args=[1]", "hooks.one.init_args", "must be a table of arguments"),
        ('--trainer={"max_epocs": 3}', "trainer.max_epocs", "Did you mean 'max_epochs'?"),
        ("--hooks.one={1: 2}", "", "put it in quotes"),
        ("--module={class_path: typed_here.Net", "", "not valid YAML"),
        ("--trainer.max_epochs.x=1", "trainer.max_epochs", "no key below it"),
    ],
)
def test_a_wrong_table_is_refused_by_its_key(project: Path, typed: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(project, HOOK, typed)
    assert caught.value.key == key
    assert said in str(caught.value)
    assert f"run.toml with {typed.partition('=')[0]}:" in str(caught.value)


def test_a_secret_inside_a_table_is_known_as_one(project: Path) -> None:
    typed = '{"class_path": "webhook", "url": "https://hooks.example/T0P-S3CRET", "timeout": -1}'
    error = refused(project, "", f"--hooks.w={typed}")
    assert "S3CRET" not in str(error) + json.dumps(error.data())
    assert has_secret("hooks.w", Override(typed)) and has_secret("hooks.w.url", Override("x"))
    assert not has_secret("hooks.w", Override('{"timeout": 1}')) and not has_secret(
        "trainer.max_epochs", Override("3")
    )


@pytest.mark.parametrize("text", ["[1e-3]", "{a: 1e-3}"])
def test_small_numbers_are_numbers_in_lists_and_tables(text: str) -> None:
    assert Override(text).guess in ([0.001], {"a": 0.001})


# ---- what scripts and tired people type --------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["--trainer.max_epochs=", "--hooks.one.threshold= ", "--module.width="])
def test_a_value_that_was_left_empty_is_not_the_default(project: Path, typed: str) -> None:
    assert "this is empty" in str(refused(project, HOOK, typed))
    assert build(project, HOOK, "--hooks.one.note=").hooks["one"].note == ""


def test_a_hook_that_is_added_takes_the_place_of_none(project: Path) -> None:
    (project / "run.toml").write_text(f"{HEAD}[hooks.early_stopping]\npatience = 8\n")
    hooks = load_config(project / "run.toml", hooks=["early_stopping", "early_stopping"]).build().hooks
    assert [hooks[name].patience for name in ("early_stopping", "early_stopping_2", "early_stopping_3")] == [
        8,
        3,
        3,
    ]


def test_names_that_differ_in_case_only_are_found(project: Path) -> None:
    assert "Did you mean 'SGD'?" in str(refused(project, "", "--optimizer=sgd"))


def test_null_for_a_hook_says_how_to_leave_it_out(project: Path) -> None:
    assert "or false to leave it out" in str(refused(project, HOOK, "--hooks.one=null"))


def test_a_missing_file_names_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    with pytest.raises(ConfigError, match=r"no such file. In its folder: run.toml"):
        read_config(tmp_path / "rum.toml")


@pytest.mark.parametrize("name", ["run.json", "run", "folder"])
def test_only_toml_and_yaml_are_configurations(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"ends in .toml, .yaml, .yml"):
        read_config(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n", "not valid YAML"),
        ("module: x\nmodule: y\n", "module: this key is there 2 times; the last is in line 2"),
        ("trainer:\n  max_epochs: 1\n  max_epochs: 2\n", "max_epochs: this key is there 2 times"),
        ("- 1\n", "table of keys"),
        ("hooks:\n  on: {}\n", "put it in quotes"),
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_bad_yaml_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(tmp_path / "run.yaml")


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
