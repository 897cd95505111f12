"""Parts of a run by their class paths: arguments, types and the classes that are found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config.configured import BASIC, trainer_of

from hookline import OptionError
from hookline.config import ConfigError, HooksConfig
from hookline.config.classes import annotation, parameters
from hookline.config.problems import describe_type
from hookline.config.sections import TrainerSection
from hookline.distributed import DDP, FSDP, Accelerated
from hookline.engine.registry import BUILTIN_HOOKS, hook_class
from hookline.loggers import (
    CSV,
    ClearML,
    Comet,
    Console,
    JSONLines,
    MLflow,
    Queued,
    TensorBoard,
    Trackio,
    WandB,
)

LOGGERS = (CSV, ClearML, Comet, Console, JSONLines, MLflow, Queued, TensorBoard, Trackio, WandB)


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


def test_init_args_can_be_overridden_under_either_spelling(project: Path) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Threshold"\nthreshold = 1\n'
    _, parts = trainer_of(project, text, "--hooks.one.init_args.threshold", "2")
    assert parts.hooks["one"].threshold == 2.0


def test_text_that_looks_like_a_number_stays_text_where_text_is_wanted(project: Path) -> None:
    text = BASIC.replace("loggers = false", 'loggers = {mine = {class_path = "parts_here.Lines"}}')
    trainer, _ = trainer_of(project, text, "--loggers.mine.prefix", "007")
    assert trainer.loggers.members[0].prefix == "007"


def test_trackers_are_found_by_name_with_their_artifacts(project: Path) -> None:
    text = BASIC.replace(
        "loggers = false",
        "\n".join(
            f'loggers.{name} = {{class_path = "{name}", artifacts = ["config", "best_checkpoint"]}}'
            for name in ("WandB", "MLflow", "Trackio", "Comet", "ClearML")
        ),
    )
    trainer, _ = trainer_of(
        project, text, "--loggers.Comet.mode", "offline", "--loggers.MLflow.artifacts", "[]"
    )
    members = {each.label: each for each in trainer.loggers.members}
    assert list(members) == ["WandB", "MLflow", "Trackio", "Comet", "ClearML"]
    assert members["WandB"].artifacts == ("config", "best_checkpoint") and members["MLflow"].artifacts == ()
    assert isinstance(members["Comet"], Queued) and members["Comet"].logger.mode == "offline"
    with pytest.raises(OptionError, match="artifacts='checkpoint', allowed: .* Did you mean 'checkpoints'"):
        trainer_of(project, text.replace("best_checkpoint", "checkpoint"))


def test_a_class_path_inside_the_arguments_is_made_too(project: Path) -> None:
    text = f"""{BASIC}[hooks.n]
class_path = "parts_here.Nested"
loss = {{class_path = "torch.nn.HuberLoss", init_args = {{delta = 2.0}}}}
anything = [1, {{a = 2}}]
"""
    _, parts = trainer_of(project, text)
    assert parts.hooks["n"].loss.delta == 2.0
    assert parts.hooks["n"].anything == [1, {"a": 2}]


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
    ("given", "right"),
    [("probes.py:Pace", "probes.Pace"), ("./probes.py:Pace", "probes.Pace"), ("a/b.py:Pace", "a.b.Pace")],
)
def test_a_file_in_place_of_a_class_path_is_refused_with_the_right_path(
    project: Path, given: str, right: str
) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{right}'"):
        trainer_of(project, f'{BASIC}[hooks.h]\nclass_path = "{given}"\n')


@pytest.mark.parametrize(
    "cls",
    [*map(hook_class, BUILTIN_HOOKS), *LOGGERS, TrainerSection, DDP, FSDP, Accelerated],
    ids=lambda cls: cls.__name__,
)
def test_every_parameter_of_what_hookline_brings_has_a_type_in_words(cls: type) -> None:
    words = {
        name: describe_type(hint) for name in parameters(cls) if (hint := annotation(cls, name)) is not None
    }
    assert words or cls is DDP
    for name, text in words.items():
        assert not re.search(r"\bAny\b|typing|<|\[|collections|'>|\ba [AEIOU]", text), f"{name}: {text}"
        assert "class_path" not in text or re.search(r"(Logger|Module|Accelerator) \(a table", text), (
            f"{name}: {text}"
        )


def test_a_bare_name_that_fits_two_classes_is_refused_with_both() -> None:
    with pytest.raises(OptionError, match=r"fits several of hook_classes \(a.x.H, b.y.H\)"):
        HooksConfig(hook_classes=["a.x.H", "b.y.H"], hook_configs={"H": {}})
