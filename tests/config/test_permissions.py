"""What an attacker who can only write a configuration file may try: every one of these is refused and leaves no trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import Trainer
from hookline.config import ConfigError, HooksConfig, load_config
from hookline.config.classes import _parser
from hookline.config.permissions import Permissions

MINE = """
import functools, logging, operator, os, pathlib, shelve, subprocess
from collections.abc import Callable
from typing import Any
import numpy as np
import torch
from torch import nn
from hookline import Hook, Module

class Net(Module):
    def __init__(self, act: nn.Module | None = None, parts: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.layer, self.act, self.parts = nn.Linear(4, 1), act, parts
    def training_step(self, batch, batch_idx): return self.layer(batch).mean()
    def train_dataloader(self): return [torch.ones(2, 4)]
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)

class Takes(Hook):
    def __init__(self, bare=None, anything: Any = None, thing: object = None, table: dict[str, Any] | None = None,
                 rows: list[Any] | None = None, array: np.ndarray | None = None, act: nn.Module | None = None,
                 either: nn.Module | dict[str, Any] | None = None, call: Callable[..., Any] | None = None,
                 makes: Callable[..., nn.Module] | None = None, kind: type | None = None) -> None:
        self.__dict__.update(locals())

class Act(nn.ReLU): pass
def double(x): return 2 * x
bound = functools.partial(double, 2)
"""
HEAD = 'module = "mine.Net"\nloggers = false\ntrainer = {max_epochs = 1, enable_progress_bar = false}\n'
SPOTS = ("bare", "anything", "thing", "table", "rows", "array", "act", "either", "call", "makes")
UNTYPED = ("bare", "anything", "thing", "table", "rows")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(MINE)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("mine", None)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(each)}" for name, each in value.items()) + "}"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def build(project: Path, text: str, head: str = HEAD, name: str = "run.toml", **more: Any) -> Any:
    (project / name).write_text(head + text)
    return load_config(project / name, **more).build()


def refused(project: Path, text: str, head: str = HEAD, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(project, text, head, **more)
    assert sorted(each.name for each in project.iterdir() if each.name != "__pycache__") in (
        ["mine.py", "run.toml"],
        ["mine.py", "run.yaml"],
    )
    return str(caught.value)


def hook(spot: str, value: Any) -> str:
    value = [value] if spot == "rows" else {"inner": value} if spot == "table" else value
    return f'[hooks.h]\nclass_path = "mine.Takes"\n{spot} = {toml(value)}\n'


# ---- what a file may allow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "builtins",
        "os",
        "os.path",
        "subprocess",
        "sys",
        "io",
        "pathlib",
        "pathlib.Path",
        "shelve",
        "logging",
        "functools",
        "operator",
        "pickle",
        "ctypes",
        "importlib",
        "runpy",
        "tempfile",
        "codecs",
        "random",
        "posix",
        "_io",
        "torch",
        "torch.hub",
        "torch.utils",
        "torch.utils.data",
        "torch.serialization",
        "torch.jit",
        "torch.package",
        "numpy",
        "numpy.lib",
        "numpy.core",
        "joblib",
        "yaml",
        "jsonargparse",
        "rich",
        "safetensors",
        "fsspec",
        "pytest",
        "hypothesis",
        "pip",
    ],
)
def test_a_file_cannot_allow_what_is_not_the_users_own(project: Path, name: str) -> None:
    for given in (f'allow = ["{name}"]\n', f'allow = "{name}"\n', f'allow = {{modules = ["{name}"]}}\n'):
        assert f"--allow {name}" in refused(project, "", given + HEAD)


def test_a_file_can_allow_a_package_of_the_users_own(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "own_package_here").mkdir()
    (elsewhere / "own_package_here" / "__init__.py").write_text(
        "from hookline import Hook\nclass Mine(Hook): pass\n"
    )
    monkeypatch.syspath_prepend(str(elsewhere))
    parts = build(
        project, '[hooks.h]\nclass_path = "own_package_here.Mine"\n', f'allow = ["own_package_here"]\n{HEAD}'
    )
    assert type(parts.hooks["h"]).__name__ == "Mine"


@pytest.mark.parametrize("installed", ["from a folder", "from a repository", "from an index", "by conda"])
def test_an_installed_package_is_the_users_own_if_it_came_from_a_folder_or_a_repository(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    site = tmp_path_factory.mktemp("env") / "site-packages"
    info = site / "somepackage-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "somepackage.py").write_text("from hookline import Hook\nclass Mine(Hook): pass\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somepackage\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("somepackage\n")
    (info / "INSTALLER").write_text("conda" if installed == "by conda" else "pip")
    if installed != "from an index":
        came = (
            {"vcs_info": {"vcs": "git", "commit_id": "0"}}
            if installed == "from a repository"
            else {"dir_info": {}}
        )
        (info / "direct_url.json").write_text(json.dumps({"url": "file:///x", **came}))
    monkeypatch.syspath_prepend(str(site))
    text, head = '[hooks.h]\nclass_path = "somepackage.Mine"\n', f'allow = ["somepackage"]\n{HEAD}'
    if installed in ("from an index", "by conda"):
        assert "--allow somepackage" in refused(project, text, head)
        assert "somepackage" not in sys.modules
        build(project, text, allow=["somepackage"])  # said by the person, not by the file
    else:
        build(project, text, head)
    assert sys.modules.pop("somepackage")


# ---- class paths in arguments ------------------------------------------------------------------------------------

ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "a memory map": ("numpy.memmap", {"filename": "made", "mode": "w+", "shape": [4]}),
    "a memory map through one's own import": (
        "mine.np.memmap",
        {"filename": "made", "mode": "w+", "shape": [4]},
    ),
    "a memory map through torch": (
        "torch.nn.functional.np.memmap",
        {"filename": "made", "mode": "w+", "shape": [4]},
    ),
    "a command": ("subprocess.Popen", {"args": ["touch", "made"]}),
    "a command through one's own import": ("mine.subprocess.Popen", {"args": ["touch", "made"]}),
    "a command through Hookline's import": (
        "hookline.hooks.slurm_requeue.subprocess.Popen",
        {"args": ["touch", "made"]},
    ),
    "open": ("builtins.open", {"file": "made", "mode": "w"}),
    "a partial": ("functools.partial", {"func": "os.system"}),
    "a partial through one's own import": ("mine.functools.partial", {"func": "os.system"}),
    "an attribute getter": ("operator.attrgetter", {"attr": "x"}),
    "a method caller": ("operator.methodcaller", {"name": "write_text"}),
    "a path's method": ("pathlib.Path.write_text", {"data": "x"}),
    "a path's method through one's own import": ("mine.pathlib.Path.touch", {}),
    "a log file": ("logging.FileHandler", {"filename": "made"}),
    "a log file through one's own import": ("mine.logging.FileHandler", {"filename": "made"}),
    "a shelf": ("shelve.open", {"filename": "made"}),
    "a shelf through one's own import": ("mine.shelve.DbfilenameShelf", {"filename": "made"}),
    "a pickle": ("torch.load", {"f": "made"}),
    "a pickle through torch.nn": ("torch.nn.functional.torch.load", {"f": "made", "weights_only": False}),
    "code from the net": ("torch.hub.load", {"repo_or_dir": "a/b", "model": "c"}),
    "code from the net through torch.nn": (
        "torch.nn.functional.torch.hub.load",
        {"repo_or_dir": "a/b", "model": "c"},
    ),
    "a data pipe": ("torch.utils.data.datapipes.iter.FileOpener", {"datapipe": ["made"], "mode": "w"}),
    "a compiled module": ("torch.jit.load", {"f": "made"}),
    "a saved program": ("torch.package.PackageExporter", {"f": "made"}),
    "a writer of summaries": ("torch.utils.tensorboard.SummaryWriter", {"log_dir": "made"}),
    "joblib": ("joblib.Memory", {"location": "made"}),
    "a temporary file": ("tempfile.NamedTemporaryFile", {"dir": ".", "delete": False}),
    "an archive": ("zipfile.ZipFile", {"file": "made", "mode": "w"}),
    "a database": ("sqlite3.connect", {"database": "made"}),
    "Hookline's own files": ("hookline.checkpoint.files.remove", {"path": "made"}),
    "a class's class": ("torch.nn.Module.__class__", {}),
    "a function's globals": ("hookline.engine.hook.Hook.__init__.__globals__", {}),
    "jsonargparse": ("jsonargparse.set_parsing_settings", {"import_path_allowlist": ["os"]}),
}


@pytest.mark.parametrize(
    ("what", "spot"),
    [
        *((what, spot) for what in ATTACKS for spot in ("anything", "act", "call")),
        *(
            (what, spot)
            for what in ("a memory map", "a pickle through torch.nn", "Hookline's own files")
            for spot in SPOTS
        ),
    ],
)
def test_a_class_path_in_an_argument_leads_to_the_right_kind_of_class_or_nowhere(
    project: Path, what: str, spot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    path, arguments = ATTACKS[what]
    said = refused(project, hook(spot, {"class_path": path, "init_args": arguments}))
    assert "hooks.h" in said and path.rpartition(".")[2] in said


@pytest.mark.parametrize("form", ["beside", "dict_kwargs", "deeper", "in yaml", "in a module", "of a switch"])
def test_no_form_of_writing_it_helps(project: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    spec: dict[str, Any] = {
        "class_path": "numpy.memmap",
        "init_args": {"filename": "made", "mode": "w+", "shape": [4]},
    }
    if form == "beside":
        refused(
            project,
            hook("anything", {"class_path": "numpy.memmap", "filename": "made", "mode": "w+", "shape": [4]}),
        )
    elif form == "dict_kwargs":
        refused(project, hook("anything", {"class_path": "numpy.memmap", "dict_kwargs": spec["init_args"]}))
    elif form == "deeper":
        refused(project, hook("anything", [{"a": [{"b": spec}]}]))
        refused(project, hook("act", {"class_path": "torch.nn.Sequential", "dict_kwargs": {"x": spec}}))
    elif form == "in yaml":
        values = {"module": "mine.Net", "hooks": {"h": {"class_path": "mine.Takes", "anything": spec}}}
        refused(project, json.dumps(values), "", name="run.yaml")
    elif form == "in a module":
        refused(
            project, "", HEAD.replace('"mine.Net"', toml({"class_path": "mine.Net", "parts": {"x": spec}}))
        )
        refused(project, "", HEAD.replace('"mine.Net"', toml({"class_path": "mine.Net", "act": spec})))
    else:
        configs = {"mine.Takes": {"anything": spec}}
        refused(project, f'[hooks]\nhook_classes = ["mine.Takes"]\nhook_configs = {toml(configs)}\n')


@pytest.mark.parametrize(
    ("spot", "path"),
    [
        *((spot, "mine.Act") for spot in UNTYPED),
        *(
            ("anything", path)
            for path in ("torch.nn.ReLU", "torch.nn.functional.relu", "nowhere", "stranger.Thing", "")
        ),
    ],
)
def test_where_a_parameter_has_no_type_a_class_path_is_neither_made_nor_passed_on(
    project: Path, spot: str, path: str
) -> None:
    said = refused(project, hook(spot, {"class_path": path}))
    if path in ("mine.Act", "torch.nn.ReLU"):
        assert "type" in said and "nn.Module" in said, said


@pytest.mark.parametrize("spot", ["bare", "anything", "thing", "table", "act", "array", "call"])
@pytest.mark.parametrize("path", ["numpy.memmap", "torch.nn.modules.activation.ReLU"])
def test_a_table_that_is_written_as_text_is_no_way_round(
    project: Path, spot: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    spec = {
        "class_path": path,
        "init_args": {"filename": "made", "mode": "w+", "shape": [4]} if "memmap" in path else {},
    }
    text = f'[hooks.h]\nclass_path = "mine.Takes"\n{spot} = {json.dumps(json.dumps(spec))}\n'
    if path == "numpy.memmap" or spot in ("bare", "anything", "thing", "table", "array"):
        try:
            made = build(project, text).hooks["h"]
        except ConfigError:
            pass
        else:
            assert getattr(made, spot) == json.dumps(spec), "text may stay text"
        assert not (project / "made").exists()
    else:
        assert isinstance(getattr(build(project, text).hooks["h"], spot), torch.nn.ReLU)


def test_a_person_who_writes_python_may_do_that(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))
    given = {"anything": {"class_path": "torch.nn.ReLU"}}
    (made,) = HooksConfig(hook_classes=["mine.Takes"], hook_configs={"mine.Takes": given}).build()
    assert type(made.anything).__name__ == "ReLU"


def test_a_parser_that_served_a_program_refuses_the_same_from_a_file_and_the_other_way_round(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    for given in ({"class_path": "torch.nn.ReLU"}, {"class_path": "mine.Act"}):
        for _ in range(2):
            settings = {"mine.Takes": {"anything": given}}
            (made,) = HooksConfig(hook_classes=["mine.Takes"], hook_configs=settings).build()
            assert isinstance(made.anything, torch.nn.ReLU)
            before = _parser.cache_info().hits
            assert "type" in refused(project, hook("anything", given))
            assert _parser.cache_info().hits > before


def test_the_right_kind_of_class_is_made_where_the_type_says_so(project: Path) -> None:
    for spot in ("act", "either", "call", "makes"):
        for path in ("mine.Act", "torch.nn.ReLU"):
            made = getattr(build(project, hook(spot, {"class_path": path})).hooks["h"], spot)
            assert type(made() if spot == "makes" and isinstance(made, type) else made).__name__ in (
                "Act",
                "ReLU",
                "partial",
                "function",
            )
    parts = build(project, hook("table", {"width": 3}))
    assert parts.hooks["h"].table == {"inner": {"width": 3}}


def test_a_wrong_kind_of_class_does_not_become_the_table_it_was_written_as(project: Path) -> None:
    assert "either" in refused(project, hook("either", {"class_path": "mine.Takes"}))
    assert "either" in refused(project, hook("either", {"class_path": "torch.nn.Nowhere"}))


# ---- functions ---------------------------------------------------------------------------------------------------

FUNCTIONS = (
    "os.system",
    "mine.os.system",
    "subprocess.run",
    "mine.subprocess.run",
    "builtins.exec",
    "builtins.eval",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "torch.nn.functional.torch.load",
    "torch.nn.functional.torch.hub.load",
    "mine.torch.load",
    "joblib.load",
    "numpy.save",
    "mine.np.save",
    "shelve.open",
    "mine.shelve.open",
    "pathlib.Path.write_text",
    "mine.pathlib.Path.touch",
    "functools.partial",
    "mine.functools.partial",
    "operator.attrgetter",
    "mine.operator.attrgetter",
    "hookline.checkpoint.files.remove",
    "hookline.cli.scaffold.write_project",
    "hookline.engine.hook.Hook.__init__",
    "torch.nn.Module.__class__",
    "logging.FileHandler",
    "mine.logging.FileHandler",
    "mine.subprocess.Popen",
    "mine.subprocess:Popen",
)


@pytest.mark.parametrize(
    ("place", "path"),
    [
        *((place, path) for path in FUNCTIONS for place in ("hook", "loss")),
        *(
            (place, path)
            for path in (
                "os.system",
                "mine.os.system",
                "hookline.checkpoint.files.remove",
                "mine.functools.partial",
            )
            for place in (
                "lr_schedule",
                "loss_schedule",
                "count_tokens",
                "val_aggregation",
                "step",
                "lr_lambda",
                "type",
            )
        ),
    ],
)
def test_a_function_comes_from_ones_own_modules_or_torchs(project: Path, place: str, path: str) -> None:
    plain = f"{HEAD.replace(chr(34) + 'mine.Net' + chr(34), toml({'class_path': 'torch.nn.Linear', 'in_features': 4, 'out_features': 1}))}"
    quick = 'optimizer = {class_path = "SGD", lr = 0.1}\n'
    texts = {
        "hook": (HEAD, f'[hooks.h]\nclass_path = "mine.Takes"\ncall = "{path}"\n'),
        "lr_schedule": (HEAD, f'[hooks.h]\nclass_path = "lr_schedule"\nschedule = "{path}"\n'),
        "loss_schedule": (HEAD, f'[hooks.h]\nclass_path = "loss_schedule"\nloss = "{path}"\n'),
        "count_tokens": (HEAD.replace("{max", f'{{count_tokens = "{path}", max'), ""),
        "val_aggregation": (HEAD.replace("{max", f'{{val_aggregation = "{path}", max'), ""),
        "loss": (f'loss = "{path}"\n{quick}{plain}', ""),
        "step": (f'step = "{path}"\n{quick}{plain}', ""),
        "lr_lambda": (f'{quick}lr_scheduler = {{class_path = "LambdaLR", lr_lambda = "{path}"}}\n{HEAD}', ""),
        "type": (HEAD, f'[hooks.h]\nclass_path = "mine.Takes"\nkind = "{path}"\n'),
    }
    head, text = texts[place]
    refused(project, text, head)


def test_functions_that_are_meant_still_work(project: Path) -> None:
    for path in ("mine.double", "mine.bound", "torch.nn.functional.relu", "torch.nn.functional.gelu"):
        assert callable(
            build(project, f'[hooks.h]\nclass_path = "mine.Takes"\ncall = "{path}"\n').hooks["h"].call
        )
    plain = HEAD.replace(
        '"mine.Net"', toml({"class_path": "torch.nn.Linear", "in_features": 4, "out_features": 1})
    )
    assert build(
        project, "", f'loss = "mse_loss"\noptimizer = {{class_path = "SGD", lr = 0.1}}\n{plain}'
    ).fit_arguments["loss"]


# ---- parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("hooks.h", "mine.subprocess.Popen"),
        ("hooks.h", "mine.np.memmap"),
        ("hooks.h", "mine.os"),
        ("module", "mine.functools.partial"),
        ("module", "torch.nn.functional.torch.jit.ScriptModule"),
        ("module", "mine.torch.jit.ScriptModule"),
        ("module", "mine.np.memmap"),
        ("module", "torch.nn.functional.torch.fx.GraphModule"),
        ("datamodule", "mine.torch.utils.data.DataLoader"),
        ("loggers", "mine.logging.FileHandler"),
        ("optimizer", "mine.functools.partial"),
        ("optimizer", "torch.optim.optimizer.torch.load"),
        ("trainer.strategy", "mine.subprocess.Popen"),
    ],
)
def test_a_part_is_of_its_kind_and_from_where_it_may_come(project: Path, place: str, path: str) -> None:
    head = HEAD.replace('"mine.Net"', f'"{path}"') if place == "module" else HEAD
    head = head.replace("loggers = false", f'loggers = ["{path}"]') if place == "loggers" else head
    head = head.replace("{max", f'{{strategy = "{path}", max') if place == "trainer.strategy" else head
    text = f'[hooks.h]\nclass_path = "{path}"\n' if place == "hooks.h" else ""
    head = f'{place} = "{path}"\n{head}' if place in ("datamodule", "optimizer") else head
    refused(project, text, head)


def test_a_bare_name_does_not_find_a_class_that_may_not_be_named(project: Path) -> None:
    assert issubclass(torch.jit.ScriptModule, torch.nn.Module)
    refused(project, hook("act", "ScriptModule"))
    refused(project, hook("act", {"class_path": "ScriptModule"}))
    assert type(build(project, hook("act", "torch.nn.ReLU")).hooks["h"].act).__name__ == "ReLU"


# ---- other features of the parser --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "module: !!python/object/apply:os.system ['touch made']\n",
        "module: !!python/name:os.system\n",
        "module: !path made\n",
        "module: !include /etc/passwd\n",
        "module: !ENV ${HOME}\n",
        "config: other.yaml\nmodule: mine.Net\n",
        "module: mine.Net\n__path__: other.yaml\n",
        "module: mine.Net\n__default_config__: other.yaml\n",
    ],
)
def test_yaml_reads_no_other_file_and_runs_nothing(
    project: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    refused(project, text, "", name="run.yaml")


def test_an_argument_that_is_the_path_of_a_file_is_not_read(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other") / "other.yaml"
    other.write_text("class_path: torch.nn.ReLU\n")
    refused(project, hook("act", str(other)))
    refused(project, hook("act", f"file://{other}"))
    assert type(build(project, hook("act", {"__path__": str(other)})).hooks["h"].act).__name__ == "Module"
    made = build(project, hook("anything", str(other))).hooks["h"].anything
    assert made == str(other)


def test_the_environment_changes_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv("APP_ANYTHING", "1")
    monkeypatch.setenv("PROG_ANYTHING", "1")
    assert build(project, '[hooks.h]\nclass_path = "mine.Takes"\n').hooks["h"].anything is None


def test_ones_own_table_is_only_data(project: Path) -> None:
    spec = {"class_path": "numpy.memmap", "init_args": {"filename": "made", "mode": "w+", "shape": [4]}}
    parts = build(project, f"[config]\nspec = {toml(spec)}\n")
    assert parts.make_trainer(Trainer).config == {"spec": spec}


def test_a_hooks_registered_name_cannot_be_taken_over(project: Path) -> None:
    (project / "early_stopping.py").write_text("raise SystemExit('imported')\n")
    made = build(project, '[hooks.h]\nclass_path = "early_stopping"\n').hooks["h"]
    assert type(made).__module__ == "hookline.hooks.early_stopping"


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
