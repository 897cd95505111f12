"""Two plans, or a plan and a trace, side by side."""

from __future__ import annotations

from tiny import Net, quiet
from tracing.traced import Listening, Watch, trace_run

from hookline import Hook, every
from hookline.tracing.reader import read_trace
from hookline.tracing.report import beside, compare, count


def test_the_tree_shows_how_often_everything_came_and_was_called():
    trace_run()
    explanation, different = beside(count(read_trace("trace.json")))
    lines = str(explanation).splitlines()
    assert lines[0] == "trainer.fit()"
    at = next(n for n, line in enumerate(lines) if "on_step_end · happened 6 times" in line)
    assert "hook watch: Watch.on_step_end" in lines[at + 1] and "called 6 times, " in lines[at + 1]
    assert "each batch" in "\n".join(lines)
    assert different == []


def test_what_was_not_planned_is_in_the_tree_as_such():
    trace_run()
    seen = count(read_trace("trace.json"))
    planned = [row for row in quiet().explain(Listening()).data() if row["listeners"]]
    explanation, different = beside(seen, planned)
    assert "not planned · called 6 times" in str(explanation)
    assert different


def test_what_was_recorded_stays_as_it_was():
    trace_run()
    seen = count(read_trace("trace.json"))
    beside(seen)
    assert all("happened" not in each for row in seen.rows for each in row["listeners"])


class Rarely(Hook):
    name = "watch"
    on_error = "warn"

    @every("5 steps")
    def on_step_end(self, loss): ...


def names(*different):
    return [each.partition(":")[0] for each in different]


def test_equal_plans_have_no_differences():
    first, second = (quiet(hooks=[Watch()]).explain(Net()) for _ in range(2))
    assert compare(first, second, ("a", "b")) == []


def test_every_difference_of_two_plans_is_named():
    first, second = quiet(hooks=[Watch()]).explain(Net()), quiet(hooks=[Rarely()]).explain(Net())
    assert compare(first, second, ("a.toml", "b.toml")) == [
        "on_train_batch_end: hook watch only in a.toml",
        "on_step_end: hook watch, function: Watch.on_step_end in a.toml, Rarely.on_step_end in b.toml",
        "on_step_end: hook watch, asks: nothing in a.toml, loss in b.toml",
        "on_step_end: hook watch, when: always in a.toml, every 5 steps in b.toml",
        "on_step_end: hook watch, on error: raise in a.toml, warn in b.toml",
    ]


def test_another_order_and_another_module_are_named():
    first = quiet(hooks=[Watch("one"), Watch("two")]).explain(Net())
    second = quiet(hooks=[Watch("two"), Watch("one")]).explain(Listening())
    found = compare(first, second, ("a", "b"))
    assert "on_step_end: one → two in a, two → one in b" in found
    assert "on_train_batch_end: module Listening only in b" in found


def test_a_hook_that_only_one_has_is_named_once_with_all_that_it_hears():
    first, second = quiet(hooks=[Watch()]).explain(Net()), quiet().explain(Net())
    line = "hook watch only in a: on_train_batch_end, on_step_end"
    assert compare(first, second, ("a", "b")) == [line] and compare(second, first, ("b", "a")) == [line]
