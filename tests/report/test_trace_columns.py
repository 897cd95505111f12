"""Traces are grouped into columns: no time is lost, and what cannot be read is passed over."""

from __future__ import annotations

import json
from typing import Any

import pytest
from report.reported import data_of, metrics, traced, written
from tiny import shown

from hookline.report.trace_columns import COLUMNS, TraceReader, read_traces


def lanes(timeline: dict[str, Any]) -> dict[str, tuple[int, float]]:
    return {each["name"]: (each["calls"], each["total"]) for each in timeline["lanes"]}


def test_time_is_kept_however_long_the_run_and_however_short_the_calls() -> None:
    path = written("run", metrics(1, loss=1.0))
    hour = 3_600_000_000.0
    calls = [("often", "on_step_end", at * 1_000_000.0, 2_000.0, at) for at in range(3600)]
    traced(path, *calls, ("once", "on_train_end", hour - 60e6, 60e6, 3600))
    found = data_of(path)["timeline"][0]
    assert lanes(found)["often"] == (3600, pytest.approx(7.2))
    assert sum(cell[2] for cell in found["cells"] if cell[0] == 1) == pytest.approx(7.2, rel=0.01)
    last = [cell for cell in found["cells"] if cell[0] == 0]  # one minute of an hour, spread over its columns
    assert (
        sum(cell[2] for cell in last) == pytest.approx(60, rel=0.01)
        and len(last) > 1
        and sum(cell[3] for cell in last) == 1
    )
    assert found["columns"] <= 300 and found["columns"] * found["width"] == pytest.approx(3600, rel=0.02)


def test_a_long_trace_needs_no_more_room_than_a_short_one() -> None:
    path = written("run", metrics(1, loss=1.0))
    traced(path, *[("hook", "on_step_end", at * 10_000.0, 5.0, at) for at in range(20_000)])
    trace = read_traces(path)
    assert trace is not None and len(trace.lanes[0, "hook"].busy) <= 2 * COLUMNS
    assert trace.lanes[0, "hook"].calls == 20_000 == sum(trace.lanes[0, "hook"].counts)


def test_ranks_on_machines_with_other_clocks_lie_side_by_side() -> None:
    path = written("run", metrics(1, loss=1.0))
    traced(path, ("a", "on_step_end", 1e6, 1e6, 1), ("a", "on_step_end", 9e6, 1e6, 2), clock=5_000_000_000)
    traced(path, ("a", "on_step_end", 1e6, 1e6, 1), rank=1, clock=77_000_000_000)
    first, second = data_of(path)["timeline"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["cells"][0][1] == second["cells"][0][1]  # the same column


def test_what_a_killed_run_leaves_is_read_up_to_where_it_is_whole() -> None:
    path = written("run", metrics(1, loss=1.0))
    file = traced(path, ("a", "on_step_end", 0, 10, 1), closed=False)
    with file.open("a") as more:
        more.write('{"name": "a", "cat": "hook", "ph": "X", "ts": 99')
    trace = read_traces(path)
    assert trace is not None and trace.lanes[0, "a"].calls == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        "[\n",
        '[{"name": 3, "cat": "hook", "ph": "X", "ts": "x", "dur": null}]\n',
        "\x00\xff\n",
        '{"traceEvents": []}\n',
        '[{"name":"a","cat":"hook","ph":"X","ts":1e999,"dur":1},\n',
        "[" * 100_000 + "\n",
    ],
    ids=shown,
)
def test_a_file_that_is_no_trace_of_a_run_is_passed_over(text: str) -> None:
    path = written("run", metrics(1, loss=1.0))
    (path / "trace.json").write_text(text, encoding="latin-1")
    assert data_of(path)["timeline"] == []


def test_what_is_added_to_a_trace_is_read_once_and_a_new_one_replaces_the_old() -> None:
    path = written("run", metrics(1, loss=1.0))
    file = traced(path, ("a", "on_step_end", 0, 10, 1), closed=False)
    reader = TraceReader(path)
    assert reader.refresh() and not reader.refresh()
    with file.open("a") as more:
        more.write(
            json.dumps(
                {
                    "name": "a",
                    "cat": "hook",
                    "ph": "X",
                    "pid": 0,
                    "args": {"event": "on_step_end", "step": 2},
                    "ts": 50,
                    "dur": 5,
                }
            )
            + ",\n"
        )
    assert reader.refresh()
    found = reader.data()
    assert found is not None and found.lanes[0, "a"].calls == 2 and found.lanes[0, "a"].total == 15
    file.unlink()
    traced(path, ("b", "on_step_end", 0, 10, 1))
    assert reader.refresh()
    found = reader.data()
    assert found is not None and [name for _, name in found.lanes] == ["b"]


def test_times_that_cannot_be_are_passed_over() -> None:
    path = written("run", metrics(1, loss=1.0))
    huge = 10**400
    file = traced(path, ("a", "on_step_end", 0, 10, 1), closed=False)
    wrong = [{"ts": huge}, {"dur": huge}, {"ts": 1e300}, {"ts": 1e308, "dur": 1e308}, {"dur": -1}]
    about = {"format": 1, "rank": 0, "clock_ns": 0, "unix_ns": huge}
    lines = [
        {"name": "a", "cat": "hook", "ph": "X", "pid": 0, "args": {}, "ts": 1, "dur": 1, **each}
        for each in wrong
    ]
    lines += [
        {"name": "hookline", "ph": "M", "pid": 0, "args": about},
        {"name": "a", "cat": "hook", "ph": "X", "pid": huge, "args": {"step": huge}, "ts": 1, "dur": 1},
    ]
    with file.open("a") as more:
        more.write(",\n".join(json.dumps(each) for each in lines) + "\n]\n")
    timeline = data_of(path)["timeline"]
    assert [(each["rank"], each["lanes"][0]["calls"], each["cells"][0][6]) for each in timeline] == [
        (0, 2, 1)
    ]
