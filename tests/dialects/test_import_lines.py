"""Import lines of other systems give Hookline's objects, unless the system is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli.programs import preloaded_run

from hookline.interop.import_lines import STAND_IN_PACKAGES, STAND_INS

LINES = {
    "from trainers import get_trainer": "get_trainer.__module__",
    "from trainers.hooks import TrainingHook": "TrainingHook.__module__",
    "import trainers.hooks": "trainers.hooks.TrainingHook.__module__",
    "from model_training_framework.config.schemas import HooksConfig": "HooksConfig.__module__",
    "from model_training_framework.trainer.hooks import TrainerHooks": "TrainerHooks.__module__",
    "from model_training_framework.trainer import GenericTrainer, GenericTrainerConfig": "GenericTrainer.__module__",
    "from kempnerforge.training.hooks import TrainingHook, HookRunner": "HookRunner.__module__",
    "from kempnerforge.training.hooks import *": "TrainingHook.__module__",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "beside.py").write_text("")
    return tmp_path


def test_every_import_line_gives_hooklines_objects_and_one_line_says_so(folder: Path) -> None:
    code = "".join(f"{line}\nprint({shown})\n" for line, shown in LINES.items())
    (folder / "all.py").write_text(code)
    done = preloaded_run("all.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    homes = done.stdout.split()
    assert len(homes) == len(LINES) and all(home.startswith("hookline.interop.") for home in homes)
    assert done.stderr.splitlines() == [
        f"hookline: replaced {name} with {STAND_INS[name]}" for name in STAND_IN_PACKAGES
    ]


def test_only_one_rank_says_what_was_replaced(folder: Path) -> None:
    (folder / "one.py").write_text("import kempnerforge.training.hooks\nprint('done')")
    done = preloaded_run("one.py", cwd=folder, RANK="1")
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_an_installed_package_is_replaced_on_request_only_and_never_in_part(folder: Path) -> None:
    (folder / "site" / "trainers").mkdir(parents=True)
    (folder / "site" / "trainers" / "__init__.py").write_text("get_trainer = 'installed'")
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    (folder / "one.py").write_text(
        "from trainers import get_trainer\nprint(get_trainer)\n"
        "try:\n    import trainers.hooks\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    done = preloaded_run("one.py", cwd=folder, PYTHONPATH=path)
    assert done.stdout == "installed\nNo module named 'trainers.hooks'\n"
    assert done.stderr == (
        "hookline: replaced nothing, because trainers is installed; add --as trainers to replace it\n"
    )
    done = preloaded_run("--as", "trainers", "one.py", cwd=folder, PYTHONPATH=path)
    assert done.stdout.startswith("<function get_trainer")
    assert done.stderr == "hookline: replaced trainers with hookline.interop.trainers\n"


def test_a_module_that_hookline_does_not_have_is_an_import_error_with_those_there_are(folder: Path) -> None:
    (folder / "one.py").write_text("import trainers.hook")
    done = preloaded_run("one.py", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: Hookline stands in for trainers and has no module 'trainers.hook'. "
        "Did you mean 'trainers.hooks'? There are: trainers, trainers.hooks."
    )
