"""Built-in hooks are looked up by name, and every name leads to a hook."""

from __future__ import annotations

import pytest
from tiny import quiet

from hookline import Hook, HookError, Trainer
from hookline.engine.hook import TIERS, snake_case
from hookline.engine.registry import BUILTIN_HOOKS, hook_class


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


def test_the_progress_bar_is_there_unless_switched_off():
    assert "progress_bar" in Trainer(logger=False).hooks
    assert "progress_bar" not in quiet().hooks
