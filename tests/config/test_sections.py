"""The sections of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from config.configured import BASIC, config_of, trainer_of

from hookline.config import ConfigError, schema
from hookline.config.load import SECTIONS, load_config
from hookline.config.permissions import Permissions
from hookline.config.sections import read_trainer
from hookline.run.option_tables import Evaluation, Hangs
from hookline.run.options import read_arguments


def test_sections_can_be_overridden_as_a_whole(project: Path) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Threshold"\n'
    trainer, parts = trainer_of(
        project, text, "--hooks", "false", "--module", "parts_here.Needy", "--module.classes", "3"
    )
    assert trainer.hooks.list_hooks() == []
    assert parts.module.classes == 3


def test_every_section_says_what_it_is_for() -> None:
    assert all(each.get("description") for each in schema()["properties"].values())


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
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [
        name
        for name in SECTIONS
        if f"| `{name}` |" not in page and f", `{name}` |" not in page and f"| `{name}`, " not in page
    ] == []


def test_tables_of_the_trainer_are_read_from_file_and_command_line(project: Path) -> None:
    text = f"""{BASIC}[trainer.evaluation]
inference_mode = true
aggregation = "torch.nn.functional.relu"
[trainer.hang_after]
after = "5 minutes"
[trainer.compile]
blocks = ["blocks.*"]
"""
    given = ("--trainer.activation_checkpointing", "Block", "--trainer.hang_after.action=abort")
    options = trainer_of(project, text, *given)[0].options
    assert options.evaluating == Evaluation(True, torch.nn.functional.relu)
    assert options.hangs == Hangs(300.0, "abort")
    assert options.activation_checkpointing == ("Block",) and options.compile == {"blocks": ("blocks.*",)}
    assert trainer_of(project, BASIC, "--trainer.val_aggregation", "macro")[0].options.evaluation == {
        "aggregation": "macro"
    }


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        (
            "--trainer.evaluation.agregation=macro",
            "trainer.evaluation.agregation",
            "Did you mean 'aggregation'",
        ),
        ("--trainer.evaluation.aggregation=mcro", "trainer.evaluation.aggregation", "'macro'"),
        ("--trainer.val_aggregation=mcro", "trainer.val_aggregation", "'macro'"),
        ("--trainer.hang_after.action=stop", "trainer.hang_after.action", "allowed: 'warn', 'abort'"),
    ],
)
def test_a_wrong_key_of_a_table_is_refused_with_its_place(
    project: Path, given: str, key: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(project, BASIC, given).build()
    assert refused.value.data()["key"] == key
    assert said in str(refused.value)


def test_an_option_and_its_older_name_are_refused_together(project: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation and val_aggregation cannot be combined"):
        config_of(
            project, BASIC, "--trainer.val_aggregation=macro", "--trainer.evaluation.inference_mode=true"
        ).build()


@pytest.mark.parametrize(
    ("trainer", "overrides", "trace", "costs"),
    [
        ({"trace": True}, [], True, True),
        ({"accounting": False}, ["--trainer.trace=t.json"], "t.json", False),
        ({"accounting": False}, ["--trainer.audit=true"], False, False),
        ({"audit": {"costs": False}}, ["--trainer.trace=true"], True, False),
        ({"audit": {"trace": True}}, ["--trainer.audit.trace=false"], False, True),
    ],
    ids=str,
)
def test_a_trace_is_a_key_of_the_audit_and_its_older_name_is_read(
    trainer: dict[str, Any], overrides: list[str], trace: Any, costs: bool
) -> None:
    source = load_config({"trainer": trainer}, overrides).source
    audit = read_arguments(read_trainer(source, Permissions()))[1].auditing
    assert (audit.trace, audit.costs) == (trace, costs)


@pytest.mark.parametrize(
    ("given", "steps"), [("true", 1), ("5", 5), ("every 10 steps", 10), ('{"every": 3}', 3), ("false", 0)]
)
def test_the_interval_of_digests_is_a_switch_a_number_or_text(given: str, steps: int) -> None:
    source = load_config({}, [f"--trainer.digest={given}"]).source
    assert read_arguments(read_trainer(source, Permissions()))[0].digests.steps == steps
