"""The reference has an entry for every public name, option, event, fact, command and exit code."""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from test_docs import loaded

import hookline
from hookline.engine.events import EVENTS, EVENTS_OF_THE_TABLE, FACT_ROWS
from hookline.run.options import DECLARATIONS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
reference, commands = loaded("reference"), loaded("commands")
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
                # Lightning's names for hooks of Hookline are subclasses with another default
                same = (
                    [value, *(each for each in value.__mro__ if each.__name__ == value.__name__)]
                    if inspect.isclass(value)
                    else [value]
                )
                known = inspect.ismodule(value) or any(
                    one is each for one in same for each in public.values()
                )
                assert known, (
                    f"{page.relative_to(DOCS)} imports {used}: add it to PAGES of tools/reference.py"
                )


def test_every_option_event_and_fact_has_a_row() -> None:
    options, lifecycle = (DOCS / "options.md").read_text(), (DOCS / "lifecycle.md").read_text()
    for group in DECLARATIONS:
        for name in inspect.get_annotations(group):
            assert f"| `{name}` |" in options
    for event in EVENTS:
        if event.name in EVENTS_OF_THE_TABLE:
            assert f"`{event.name}`" in lifecycle
    for fact in FACT_ROWS:
        assert f"| `{fact.name}` |" in lifecycle


def test_every_command_has_a_section_and_every_exit_code_a_row() -> None:
    from hookline.cli import BROKEN_PIPE, INTERRUPTED, OK
    from hookline.reliability.watchdog import EXIT_HUNG

    found = entries("commands")
    names = [name for name, _, _ in commands.commands()]
    assert len(names) >= 20 and set(names) <= set(found)
    for name, parser, _ in commands.commands():
        for action in parser._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or f"`{option}`" in found[name]
    rows = re.findall(r"^\| (\d+) \|", found["Exit codes"], re.MULTILINE)
    assert {OK, INTERRUPTED, BROKEN_PIPE, EXIT_HUNG, 1, 2, 138, 143} == set(map(int, rows))


def test_a_docstring_gives_the_texts_of_its_parameters() -> None:
    doc = """Watch a metric. It is checked.

    monitor: the metric's name. mode: 'min' or 'max': which is better.
    low, high: the limits; None: no limit.
    """
    prose, found = reference.parameter_texts(doc, ["monitor", "mode", "low", "high", "other"])
    assert prose == "Watch a metric. It is checked."
    assert found == {
        "monitor": "the metric's name.",
        "mode": "'min' or 'max': which is better.",
        "low": "the limits; None: no limit.",
        "high": "the limits; None: no limit.",
    }
