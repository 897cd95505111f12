"""`hookline run`: a program with import lines of another system runs as with Python itself, apart from what is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.programs import hookline_run, python

import hookline
from hookline.cli import SYSTEMS
from hookline.interop.import_lines import LIGHTNING_TRAINERS, STAND_IN_PACKAGES

ABOUT = """
import os, sys
print(__name__, __file__, __package__, __spec__, __doc__, sys.argv, sys.path[0], os.getcwd())
print(sys.modules["__main__"].ABOUT is ABOUT if (ABOUT := []) is not None else "")
import beside
print(beside.__file__)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "beside.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "code",
    [
        ABOUT,
        "import sys\nsys.exit(7)",
        "import sys\nsys.exit('a last word')",
        "def f():\n    raise ValueError('wrong')\n\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()",
        "print(1\n",
        "import nowhere",
        "raise KeyboardInterrupt",
        "import atexit\natexit.register(lambda: print('at exit', __name__))",
        "import sys\nsys.excepthook = lambda *error: print('own hook', error[0].__name__, error[2].tb_lineno)\n1 / 0",
        "import pickle\nclass Own: pass\nprint(type(pickle.loads(pickle.dumps(Own()))) is Own)",
    ],
    ids=[
        "about",
        "exit",
        "words",
        "error",
        "syntax",
        "import",
        "interrupt",
        "atexit",
        "excepthook",
        "pickle",
    ],
)
def test_everything_else_is_as_with_python_itself(folder: Path, code: str) -> None:
    (folder / "programs" / "program.py").write_text(code)
    words = ["programs/program.py", "a", "--json", "--as", "x", "-m"]
    here, there = hookline_run(*words, cwd=folder), python(*words, cwd=folder)
    assert (here.stdout, here.stderr) == (there.stdout, there.stderr)
    # Python ends itself by the signal, which a shell shows as 130
    assert here.returncode == (130 if "KeyboardInterrupt" in code else there.returncode)


def test_a_module_runs_as_with_python_itself(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys\nfrom package import part")
    (package / "part.py").write_text(
        "import sys\nprint(__name__, __package__, __spec__ and __spec__.name, __file__, sys.argv, sys.path[0])"
    )
    for name in ("package.part", "package"):
        here = hookline_run("-m", name, "--flag", cwd=folder)
        there = python("-m", name, "--flag", cwd=folder)
        assert (here.stdout, here.stderr, here.returncode) == (there.stdout, there.stderr, there.returncode)
    done = hookline_run("-m", "package.nothing", cwd=folder)
    assert done.returncode == 2 and done.stderr.startswith(
        "hookline: -m package.nothing: there is no such module"
    )


def test_a_program_that_is_not_there_is_a_wrong_command(folder: Path) -> None:
    done = hookline_run("nothing.py", cwd=folder)
    assert done.returncode == 2
    assert done.stderr == "hookline: nothing.py: this program cannot be read: No such file or directory.\n"


def test_without_lightning_one_sentence_says_what_to_do(folder: Path) -> None:
    (folder / "one.py").write_text("print('runs')")
    source = str(Path(hookline.__file__).parents[1])
    words = ("-S", "-m", "hookline", "run", "--as", "lightning", "one.py")  # -S: no package is installed
    done = python(*words, cwd=folder, PYTHONPATH=source)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "hookline: --as lightning: Lightning is not installed: run `pip install lightning`, or change the import "
        "line of the program to `from hookline.interop.lightning import Trainer`.\n"
    )


def test_the_command_knows_the_systems_that_can_be_replaced() -> None:
    assert sorted(SYSTEMS) == sorted([*STAND_IN_PACKAGES, *LIGHTNING_TRAINERS])
