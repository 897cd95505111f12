"""The package as users get it: what is in the wheel, that the sdist builds the same one, and that it runs when installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from hookline import __version__

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INFO = f"hookline-{__version__}.dist-info"


def build(checkout: Path, kind: str, folder: Path) -> Path:
    """Build a wheel or an sdist with what is installed here, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_the_package_and_its_licences_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"hookline-{__version__}-py3-none-any.whl"
    source = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "hookline").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    licences = {f"{INFO}/licenses/{name}" for name in PROJECT["license-files"]}
    inside = contents(wheel)
    assert inside.keys() == source | about | licences
    assert {
        "hookline/py.typed",
        "hookline/report/parts/page.html",
        "hookline/report/parts/uplot.min.js",
    } < source
    assert all(
        inside[f"{INFO}/licenses/{name}"] == (ROOT / name).read_bytes() for name in PROJECT["license-files"]
    )


def test_the_metadata_of_the_wheel_is_that_of_the_project(wheel: Path) -> None:
    inside = contents(wheel)
    stated = HeaderParser().parsestr(inside[f"{INFO}/METADATA"].decode())
    assert (stated["Name"], stated["Version"]) == ("hookline", __version__)
    assert stated["Requires-Python"] == PROJECT["requires-python"]
    assert stated["License-Expression"] == "MIT"
    assert set(stated.get_all("Classifier") or ()) == set(PROJECT["classifiers"])
    assert {tuple(each.split(", ", 1)) for each in stated.get_all("Project-URL") or ()} == set(
        PROJECT["urls"].items()
    )
    required = [each for each in stated.get_all("Requires-Dist") or () if "extra ==" not in each]
    assert sorted(required) == sorted(PROJECT["dependencies"])
    assert inside[f"{INFO}/entry_points.txt"].decode().split("\n\n") == [
        "[console_scripts]\nhookline = hookline.cli:main",
        "[pytest11]\nhookline = hookline.testing.plugin\n",
    ]


def test_the_sdist_has_what_the_wheel_needs_and_builds_the_same(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "from", filter="data")
    checkout = tmp_path / "from" / f"hookline-{__version__}"
    assert {path.name for path in checkout.iterdir()} == {
        "src", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "PKG-INFO", ".gitignore",
    }  # fmt: skip
    assert contents(build(checkout, "wheel", tmp_path / "again")) == contents(wheel)


def test_the_wheel_runs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """The environment has the packages that Hookline requires from this one, which also has Hookline, but as a checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], cwd=tmp_path, check=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, str(wheel)], cwd=tmp_path, check=True)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    shared = [each for each in sys.path if each.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(shared))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str | Path) -> str:
        ran = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert run(python.with_name("hookline"), "--version") == f"hookline {__version__}\n"
    code = "import hookline, importlib.metadata as m; print(hookline.__file__, m.version('hookline'))"
    assert run(python, "-c", code).split() == [str(packages / "hookline" / "__init__.py"), __version__]
    run(python.with_name("hookline"), "new", "project")
    assert (tmp_path / "project" / "run.toml").exists()
