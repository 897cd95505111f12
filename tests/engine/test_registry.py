"""Built-in hooks are looked up by name, and every name leads to a hook."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from tiny import quiet

from hookline import Hook, HookError, HooklineError, Trainer
from hookline.engine.hook import TIERS, snake_case
from hookline.engine.registry import BUILTIN_HOOKS, GROUP, hook_class, offered_hooks


@pytest.mark.parametrize("name", BUILTIN_HOOKS)
def test_every_name_leads_to_a_hook_of_that_name_that_runs_after_the_users(name):
    hook = hook_class(name)
    assert issubclass(hook, Hook)
    assert (hook.name or snake_case(hook.__name__)) == name
    assert (hook.order if hook.order is not None else TIERS[hook.tier]) > TIERS["user"]


def test_an_unknown_name_is_an_error_with_the_closest_and_the_list():
    with pytest.raises(
        HookError,
        match=r"no hook called 'progres_bar'. Did you mean 'progress_bar'\? There are: .*progress_bar",
    ):
        hook_class("progres_bar")


@pytest.mark.parametrize("name", ["early_stopping", "EarlyStoping"])
def test_a_name_in_place_of_a_hook_is_refused_with_the_object_to_pass(name):
    said = (
        f"The text '{name}' is not a hook. Pass an object: from hookline.hooks import EarlyStopping; hooks="
    )
    for call in (lambda: quiet(hooks=[name]), lambda: quiet().add_hook(name), lambda: quiet(hooks=name)):
        with pytest.raises(HooklineError, match=said):
            call()


def test_the_progress_bar_is_there_unless_switched_off():
    assert "progress_bar" in Trainer(logger=False).hooks
    assert "progress_bar" not in quiet().hooks


def test_what_packages_offer_is_read_once_and_again_when_something_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(folder: str, version: str, hook: str) -> None:
        info = tmp_path / folder / f"offering-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: offering\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nshiny = offering.{hook}\n")

    (tmp_path / "first").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "second"))
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    assert "shiny" not in offered_hooks()
    install("second", "1.0", "old:Shiny")
    assert offered_hooks()["shiny"] == "offering.old:Shiny"
    install("first", "2.0", "new:Shiny")
    assert offered_hooks()["shiny"] == "offering.new:Shiny"

    def read(**given: Any) -> Any:
        raise AssertionError("nothing was installed since")

    monkeypatch.setattr(importlib.metadata, "distributions", read)
    assert offered_hooks()["shiny"] == "offering.new:Shiny"
