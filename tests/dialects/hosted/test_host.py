"""Hosts: the events that each can emit, and hooks that need more are refused."""

from __future__ import annotations

from typing import Any

import pytest
from dialects.looped import net_and_sgd
from torch import nn

import hookline
from hookline import EVENTS, Hook, Line
from hookline.engine.events import Event
from hookline.hooks import SlurmRequeue
from hookline.interop.hosted.host import HOSTS


def test_an_event_that_the_host_cannot_tell_is_refused_when_the_hook_is_added() -> None:
    class Moves(Hook):
        def on_after_batch_transfer(self, batch: Any) -> None: ...

    with pytest.raises(
        hookline.HookError,
        match=r"hook 'moves' \(Moves\) listens to on_after_batch_transfer, which a loop with "
        r"hookline.Line cannot emit: the loop moves its batches itself",
    ):
        Line(*net_and_sgd(), hooks=[Moves()])


def test_a_built_in_hook_that_can_do_nothing_in_a_loop_is_refused_when_it_is_added() -> None:
    with pytest.raises(
        hookline.HookError, match=r"SlurmRequeue\) has no effect in a loop with hookline.Line: it acts when"
    ):
        Line(nn.Linear(4, 2), hooks=[SlurmRequeue()])


@pytest.mark.parametrize("name", HOSTS)
def test_the_tables_of_hosts_speak_of_real_events(name: str) -> None:
    host = HOSTS[name]
    heard = {
        each.name for each in EVENTS if "H" in each.receivers and not each.action and each.inside != "own"
    }
    assert set(host.offers) <= heard and set(host.lacks) <= heard
    assert not set(host.offers) & set(host.lacks)
    assert all(host.why_lacking(EVENTS[each]) for each in host.lacks)
    assert not any(host.why_lacking(EVENTS[each]) for each in host.offers)


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_refuses_an_event_that_its_tables_do_not_name(name: str) -> None:
    host = HOSTS[name]
    assert host.why_lacking(Event("on_new", "H", (), "A new event.")) == "only hookline.Trainer emits it"
    assert not host.why_lacking(EVENTS["on_sanity_check_start"])
    assert not host.why_lacking(EVENTS["on_predict_batch_end"])
    assert not host.why_lacking(EVENTS["on_validation_abandoned"])
