"""The reference has an entry for every public name, option, event, fact, command, exit code and file."""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from signal import SIGTERM, SIGUSR1

import pytest
from test_docs import loaded

import hookline
import hookline.report
from hookline import hooks
from hookline.cli import RUNS, main
from hookline.config.load import SECTIONS
from hookline.engine.events import EVENTS, EVENTS_OF_THE_TABLE, FACT_ROWS
from hookline.loggers import CSV, JSONLines
from hookline.run.option_tables import OLD_NAMES, TABLES
from hookline.run.options import DECLARATIONS
from hookline.testing import TinyModule, tiny_batches, tiny_trainer
from hookline.tracing.reader import read_trace

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
reference, commands, results = loaded("reference"), loaded("commands"), loaded("results")
PUBLIC = [
    (key, module, name)
    for key, page in reference.PAGES.items()
    for module, name in reference.public_names(page)
]

INTERNAL = {
    "hookline.data.mixing",  # Mixture is a name of hookline; the rest serves the loops
    "hookline.distributed",  # all but make_strategy are names of hookline
    "hookline.interop.lightning.hparams",
    "hookline.interop.lightning.modules",
    "hookline.training.lifecycle",
    "hookline.engine.registry",
    "hookline.engine.events",
    "hookline.checkpoint.files",
}
"""Modules with `__all__` that a page of the reference does not list as a whole."""
RUN_FILES = "## In a run's directory"
PRIVATE = {"AttributeDict", "Auditing", "ConfigPart", "Digesting", "Event", "FilterSettings"} | {
    "FunctionRegistration", "Pass", "Pick", "Ranks", "RecordedRun", "StateDict"
}  # fmt: skip
"""Classes that public functions return for the engine, the loops and other functions of Hookline."""
SOURCE = "\n".join(path.read_text() for path in (ROOT / "src" / "hookline").rglob("*.py"))
OF_ANOTHER = ("hookline.interop.lightning.trainer.Trainer",)
"""Classes whose parameters another package documents."""


def entries(key: str) -> dict[str, str]:
    """The text under each heading of a page."""
    parts = re.split(r"^#{2,4} (.*)$", (DOCS / "reference" / f"{key}.md").read_text(), flags=re.MULTILINE)
    found: dict[str, str] = {}
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        found[title] = found.get(title, "") + text
    return found


def test_every_module_that_lists_public_names_is_on_a_page() -> None:
    listing = set()
    for each in pkgutil.walk_packages(hookline.__path__, "hookline."):
        source = ROOT / "src" / Path(*each.name.split("."))
        path = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
        if re.search(r"^__all__ =", path.read_text(), re.MULTILINE):
            listing.add(each.name)
    on_pages = {module for page in reference.PAGES.values() for module in page.modules}
    assert listing - on_pages - INTERNAL == set()


def test_the_reference_counts_every_public_name() -> None:
    assert len(PUBLIC) == len(set(PUBLIC)) >= 150
    for module in ("hookline", "hookline.hooks", "hookline.loggers", "hookline.testing", "hookline.config"):
        assert {name for _, where, name in PUBLIC if where == module} == set(
            importlib.import_module(module).__all__
        )


@pytest.mark.parametrize("key", reference.PAGES)
def test_every_public_name_has_its_parameters_their_defaults_and_an_example(key: str) -> None:
    found = entries(key)
    for page, module, name in PUBLIC:
        if page != key:
            continue
        text = found[name]
        assert f"`from {module} import {name}`" in text
        assert re.search(r"^(Example: |See )\[", text, re.MULTILINE), f"{name} has no example"
        value = getattr(importlib.import_module(module), name)
        if inspect.ismodule(value):
            value = getattr(value, name)
        if f"{getattr(value, '__module__', '')}.{name}" in reference.OPTIONS or not callable(value):
            continue
        if inspect.isclass(value) and issubclass(value, enum.Enum):
            assert all(f"`{name}.{member}`" in text for member in value.__members__)
            continue
        if inspect.isclass(value) and issubclass(value, BaseException) and "__init__" not in vars(value):
            continue
        for parameter in reference.parameters_of(value):
            assert re.search(rf"\b{parameter.name}\b", text), f"{name}: {parameter.name}"
            plain = isinstance(parameter.default, (int, float, str)) and not hasattr(
                parameter.default, "name"
            )
            if plain:
                shown = repr(parameter.default).replace("'", '"')
                assert shown in text.replace("\\|", "|"), f"{name}: {parameter.name}={shown}"


def test_every_name_that_the_docs_import_has_an_entry() -> None:
    public = {
        f"{module}.{name}": getattr(importlib.import_module(module), name) for _, module, name in PUBLIC
    }
    for page in DOCS.rglob("*.md"):
        for _, code in reference.python_blocks(page.read_text()):
            for used in reference.names_of_hookline(code):
                if "." not in used or used in public or any(used.startswith(f"{each}.") for each in public):
                    continue
                value = pkgutil.resolve_name(used)
                # Lightning's facade makes its own EarlyStopping of ours: the same but for a default
                own = {value, *getattr(value, "__bases__", ())} if inspect.isclass(value) else [value]
                known = inspect.ismodule(value) or any(each in own for each in public.values())
                assert known, (
                    f"{page.relative_to(DOCS)} imports {used}: add it to PAGES of tools/reference.py"
                )


def test_every_option_event_and_fact_has_a_row() -> None:
    options, lifecycle = (DOCS / "options.md").read_text(), (DOCS / "lifecycle.md").read_text()
    for group in DECLARATIONS:
        for name in inspect.get_annotations(group):
            assert f"| `{name}` |" in options
    for option, keys in TABLES.items():
        section = options.partition(f"## Keys of {option}\n")[2].partition("\n## ")[0]
        assert [each.name for each in fields(keys)] == re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    for old in OLD_NAMES:
        assert f"| `{old}` |" in options.partition("## Older names\n")[2]
    for event in EVENTS:
        if event.name in EVENTS_OF_THE_TABLE:
            assert f"`{event.name}`" in lifecycle
    for fact in FACT_ROWS:
        kind = "Facts of every event" if fact.everywhere else "Facts of the events that list them"
        section = lifecycle.partition(f"### {kind}\n")[2].partition("\n#")[0]
        assert re.search(rf"^\| `{fact.name}`[,` \w]* \| ", section, re.MULTILINE)


def test_every_command_has_a_section_and_every_exit_code_a_row() -> None:
    from hookline.cli import output
    from hookline.reliability.watchdog import EXIT_HUNG
    from hookline.training.ranks.failure_monitor import EXIT_FAILED

    found = entries("commands")
    names = [name for name, _, _ in commands.commands()]
    assert len(names) >= 20 and set(names) <= set(found)
    for name, parser, _ in commands.commands():
        for action in parser._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or f"`{option}`" in found[name]
    rows = re.findall(r"^\| (\d+) \|", found["Exit codes"], re.MULTILINE)
    codes = {getattr(output, name) for name in vars(output) if name.isupper() and name != "WIDEST"}
    assert codes | {EXIT_HUNG, EXIT_FAILED, 128 + SIGUSR1, 128 + SIGTERM} == set(map(int, rows))


@pytest.mark.parametrize("command", [name for name in RUNS if name != "explain"])
def test_every_section_that_a_command_takes_is_in_its_help_and_in_the_reference(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line takes the sections of a configuration before argparse sees them."""
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    helped, row = capsys.readouterr().out, entries("commands")[f"hookline {command}"]
    for section in SECTIONS:
        code = main([command, str(tmp_path / "run.toml"), f"--{section}", "1"])
        assert code == 2 and "unrecognized" not in capsys.readouterr().err  # it is read, and then refused
        assert f"  --{section} " in helped and f"| `--{section}` |" in row


def test_every_argument_of_every_command_has_a_text() -> None:
    silent = [
        f"{name}: {action.dest}"
        for name, parser, _ in commands.commands()
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert silent == []


def test_a_docstring_gives_the_texts_of_its_parameters() -> None:
    doc = """Watch a metric. It is checked.

    monitor: the metric's name. mode: 'min' or 'max': which is better.
    low, high: the limits; None: no limit. steps ('500', or 'all') or time ('10 minutes'): when to check.
    """
    prose, found = reference.parameter_texts(
        doc, ["monitor", "mode", "low", "high", "other", "steps", "time"]
    )
    assert prose == "Watch a metric. It is checked."
    assert found == {
        "monitor": "the metric's name.",
        "mode": "'min' or 'max': which is better.",
        "low": "the limits; None: no limit.",
        "high": "the limits; None: no limit.",
        "steps": "'500', or 'all': when to check.",
        "time": "'10 minutes': when to check.",
    }


def described(page: str) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Every class, function and detailed method of a page: its name, its parameters and their texts."""
    for key, module, name in PUBLIC:
        value = getattr(importlib.import_module(module), name)
        value = getattr(value, name) if inspect.ismodule(value) else value
        if key != page or (inspect.isclass(value) and issubclass(value, enum.Enum)):
            continue
        if not inspect.isclass(value):
            if inspect.isfunction(value):
                yield name, reference.names_of(value), reference.function_texts(value)[1]
            continue
        path = f"{value.__module__}.{value.__qualname__}"
        if path not in reference.OPTIONS and path not in OF_ANOTHER:
            names = reference.class_parameters(value)
            yield name, names, reference.inherited_texts(value, names)
        methods = reference.defined(value) if reference.has_detail(name, value) else {}
        for method, given in methods.items():
            function = getattr(given, "__func__", given)
            if inspect.isfunction(function):
                texts = reference.function_texts(function, reference.overridden(value, method))[1]
                yield f"{name}.{method}", reference.names_of(function), texts


@pytest.mark.parametrize("page", reference.PAGES)
def test_every_parameter_has_its_own_text(page: str) -> None:
    """args and kwargs stand for the parameters of an override: `training_step(self, batch, batch_idx)`."""
    silent, mixed = [], []
    for name, parameters, texts in described(page):
        silent += [f"{name}: {each}" for each in parameters if not texts.get(each)]
        for each, said in texts.items():
            others = "|".join(other for other in parameters if other != each)
            found = re.search(rf"(?:^|[.;,] |`)({others})`?(?: \([^)]*\))?: ", said) if others else None
            mixed += [f"{name}: {each} has the text of {found.group(1)}"] if found else []
    assert [each for each in silent if not re.search(r"_step: (kw)?args$", each)] == []
    assert mixed == []


def test_the_methods_of_a_private_base_are_those_of_the_class() -> None:
    found = entries("hookline")
    for name in ("log", "stop", "add_hook", "attach", "start_batch", "save_checkpoint"):
        assert f"Line.{name}" in found
    for name in ("roll_back", "samples", "exclude_samples", "num_batches"):
        assert f"Trainer.{name}" in found
    rows = re.findall(r"^\| `(\w+)` \|", found["Hook.state_dict"], re.MULTILINE)
    assert {"tier", "order", "ranks", "on_error", "observes", "budget"} <= set(rows)


def test_every_object_that_a_public_function_returns_has_an_entry_with_texts() -> None:
    public, text = {name for _, _, name in PUBLIC}, (DOCS / "reference" / "results.md").read_text()
    listed = {each.__name__ for each in results.result_classes()}
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == listed
    assert re.findall(r"^\| `\w+` \|  \|$", text, re.MULTILINE) == []  # no attribute without a text
    ours = {each for each in results.returned_by() if each not in public | listed}
    assert {each for each in ours if re.search(rf"^class {each}\b", SOURCE, re.MULTILINE)} <= PRIVATE


def test_the_events_of_a_hook_are_not_listed_as_its_methods() -> None:
    assert not re.search(r"^\| `on_\w+\(", (DOCS / "reference" / "hooks.md").read_text(), re.MULTILINE)
    assert "`on_train_batch_end(" in entries("interop")["TrainerHooks"]  # the interface of another system


# ---- files of a run ------------------------------------------------------------------------------------------


def table(page: str, heading: str) -> list[str]:
    """The words in code of the first column, in the tables of a section, without their heads."""
    section = (DOCS / page).read_text().partition(f"{heading}\n")[2]
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    first = re.findall(r"^\| (`[^|]*?) \|.*\n(?!\|---)", section, re.MULTILINE)
    return [word for cell in first for word in re.findall(r"`([^`]*)`", cell)]


def test_the_log_has_no_type_that_the_reference_does_not_have() -> None:
    written: set[str] = set()
    for path in (ROOT / "src" / "hookline").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "log_event(" in text else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            kind = getattr(node.args[0], "value", None) if node.args else None
            is_record = node.func.attr == "write" and path.name == "jsonl.py"
            if (is_record or node.func.attr == "log_event") and isinstance(kind, str):
                written.add(kind)
    assert len(written) > 15
    assert written == set(table("reference/files.md", "## log.jsonl"))


class Listed(hookline.Hook):
    """Lists the files that exist during a run."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def on_step_end(self, trainer: hookline.Trainer) -> None:
        found = trainer.run_dir.rglob("*")
        self.files |= {str(each.relative_to(trainer.run_dir)) for each in found if not each.is_dir()}


def test_the_reference_has_every_file_of_a_run_and_the_fields_of_its_records(tmp_path: Path) -> None:
    listed, run = Listed(), tmp_path / "run"
    trainer = hookline.Trainer(
        max_epochs=1,
        run_dir=run,
        audit={"changes": True, "trace": True},
        digest=True,
        logger=[JSONLines(), CSV()],
        enable_progress_bar=False,
        hooks=[
            listed,
            hooks.ModelCheckpoint(every_n_train_steps=1),
            hooks.JSONLog(1),
            hooks.Heartbeat(),
            hooks.ModelSummary(),
            hooks.GradientMonitor(log_frequency=1, log_histogram=True),
        ],
    )
    trainer.fit(TinyModule(), tiny_batches(2), tiny_batches(1))
    hookline.report.write_report([run])
    writer = hooks.PredictionWriter()
    tiny_trainer(writer, run_dir=run).predict(TinyModule(), tiny_batches(2))
    files = {str(each.relative_to(run)) for each in run.rglob("*") if not each.is_dir()} | listed.files
    patterns = [re.sub("NAME|STEP|TIME|N|R", ".*", each) for each in table("reference/files.md", RUN_FILES)]
    unknown = [
        name
        for name in files
        if not any(re.fullmatch(each + (".*" if each.endswith("/") else ""), name) for each in patterns)
    ]
    assert unknown == []
    assert {"run.lock", "batches/rank-0.jsonl", "digests.jsonl", "hparams.csv"} <= files

    record = json.loads((run / "run.json").read_text())
    assert set(record) == set(table("runs.md", "## The record of a run: `run.json`"))
    manifest = json.loads((run / "checkpoints/last/manifest.json").read_text())
    described = set(table("checkpoints.md", "## Files of a checkpoint"))
    assert set(manifest) <= described and set(manifest["files"]) <= described
    categories = {each["cat"] for each in read_trace(run / "trace.json") if "cat" in each}
    assert {f'"cat": "{each}"' for each in categories} <= set(table("reference/files.md", "## trace.json"))
    records = [json.loads(line) for path in run.glob("logs/*") for line in path.read_text().splitlines()]
    assert {each["type"] for each in records} <= set(
        table("reference/files.md", "## logs/training_TIME.jsonl")
    )
