"""The rows of the table: consistent, found by any documented spelling, and errors with the closest name."""

from __future__ import annotations

import pytest

import hookline.util.errors
from hookline import EVENTS, HookError
from hookline.engine.events import BRANCHES, EVENT_ROWS, EVERY_STAGE, FACT_ROWS, RECEIVERS, REPLACE, SIGNAL
from hookline.run.state import State


def test_no_two_events_share_a_name():
    names = [event.name for event in EVENT_ROWS]
    assert len(names) == len(set(names))


def test_no_two_facts_share_a_name_or_spelling():
    names = [name for fact in FACT_ROWS for name in (fact.name, *fact.spellings)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_a_method_name_means_one_event_to_each_receiver(receiver):
    names = [
        name for event in EVENT_ROWS if receiver in event.receivers for name in (event.name, *event.spellings)
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("event", EVENT_ROWS, ids=lambda event: event.name)
def test_a_row_is_consistent(event):
    facts = {fact.name for fact in FACT_ROWS}
    assert set(event.facts) <= facts
    assert set(event.live) <= facts
    assert len(event.facts) == len(set(event.facts))
    assert set(event.receivers) <= set(RECEIVERS) and len(event.receivers) == len(set(event.receivers))
    assert event.inside in BRANCHES
    assert set(event.stages) <= set(EVERY_STAGE) and event.stages
    assert event.doc.endswith((".", "'."))
    assert bool(event.signals) == (event.returns == SIGNAL)
    assert all(
        isinstance(getattr(hookline.util.errors, name), hookline.util.errors.Signal) for name in event.signals
    )
    assert bool(event.replaces) == (event.returns == REPLACE)
    assert not (event.action and "H" in event.receivers), "a hook watches, it does not do the run's work"


@pytest.mark.parametrize("event", EVENT_ROWS, ids=lambda event: event.name)
def test_every_fact_of_a_row_can_be_read_before_it_exists(event):
    for fact in EVENTS.facts_at(event):
        eval(EVENTS.expression(fact, event), {"s": State()})


@pytest.mark.parametrize(
    "event", [event for event in EVENT_ROWS if event.replaces], ids=lambda event: event.name
)
def test_what_a_row_replaces_is_what_its_listeners_are_given(event):
    given = {EVENTS.expression(fact, event) for fact in EVENTS.facts_at(event)}
    assert f"s.{event.replaces}" in given


@pytest.mark.parametrize(
    ("event", "spellings"),
    [
        ("on_train_start", "on_train_begin on_training_start"),
        ("on_train_end", "on_training_end"),
        ("on_train_epoch_start", "on_epoch_start on_epoch_begin"),
        ("on_train_epoch_end", "on_epoch_end"),
        ("on_train_batch_start", "on_batch_start on_batch_begin"),
        ("on_train_batch_end", "on_batch_end"),
        ("on_validation_start", "on_pre_performance_check on_eval_start on_eval_begin"),
        ("on_validation_end", "on_post_performance_check on_eval_end"),
        ("on_train_metrics", "on_tng_metrics"),
    ],
)
def test_the_documented_spellings_of_events_are_accepted(event, spellings):
    for name in (event, *spellings.split()):
        assert EVENTS.named(name).name == event
        assert EVENTS.named(name.removeprefix("on_")).name == event


def test_an_unknown_event_is_an_error_with_the_closest_name():
    with pytest.raises(
        HookError, match=r"'on_train_bach_end' is not an event .* Did you mean 'on_train_batch_end'"
    ):
        EVENTS.named("on_train_bach_end")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("epoch_finish", "on_epoch_end"), ("train_stopped", "on_train_end"), ("begin_epoch", "on_epoch_start")],
)
def test_another_word_for_a_moment_leads_to_that_moment(name, meant):
    with pytest.raises(HookError, match=f"Did you mean '{meant}'"):
        EVENTS.named(name)


def test_pairs_are_the_events_that_begin_and_end_something():
    """By their names, by `ends` where the names do not say so, and those that users declare."""
    pairs = {pair.name: (pair.begin.name, *(each.name for each in pair.ends)) for pair in EVENTS.pairs()}
    assert pairs["train_epoch"] == ("on_train_epoch_start", "on_train_epoch_end")
    assert pairs["backward"] == ("on_before_backward", "on_after_backward")
    assert pairs["validation"] == ("on_validation_start", "on_validation_end", "on_validation_abandoned")
    assert pairs["save_checkpoint"] == ("on_save_checkpoint", "on_checkpoint_save", "on_checkpoint_failed")
    starts = [event.name for event in EVENT_ROWS if event.name.endswith("_start")]
    ends = [name.removesuffix("_start") + "_end" for name in starts]
    assert len(starts) == 14 and all(name in EVENTS for name in ends)
    assert {begin for begin, *_ in pairs.values()} >= set(starts)
    for event in EVENT_ROWS:
        assert not event.ends or event.ends in EVENTS
    for name in ("on_phase_start", "on_phase_end"):
        EVENTS.declare(name)
    try:
        assert "phase" in {pair.name for pair in EVENTS.pairs()}
        EVENTS.forget("on_phase_end")
        assert "phase" not in {pair.name for pair in EVENTS.pairs()}
    finally:
        EVENTS.forget("on_phase_start")
