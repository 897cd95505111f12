"""Traces are read however a run left them, refused if they are none, and put together on one clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import shown
from tracing.traced import load, trace_run

from hookline import OptionError
from hookline.cli import main
from hookline.tracing.reader import merge, of_first_rank, read_trace
from hookline.tracing.report import beside, count


def test_a_trace_reads_as_it_was_written():
    assert list(read_trace("trace.json") if trace_run() else ()) == load("trace.json")


@pytest.mark.parametrize("left", [0.3, 0.6, 0.99])
def test_a_trace_that_was_cut_off_anywhere_reads_up_to_there(left):
    whole = trace_run()
    data = Path("trace.json").read_bytes()
    Path("cut.json").write_bytes(data[: int(len(data) * left)])
    found = list(read_trace("cut.json"))
    assert found == whole[: len(found)]
    assert 0.2 * len(whole) < len(found) < len(whole)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is not a trace of Hookline"),
        ("[{}]", "is not a trace of Hookline"),
        ('[{"name":"hookline","ph":"M","args":{"for', "is damaged: its first line is incomplete"),
        (
            '[{"name":"hookline","ph":"M","args":{"format":99}}\n]',
            "has format 99; this version of Hookline reads format 1",
        ),
    ],
)
def test_what_is_no_trace_is_refused(content, why):
    Path("odd.json").write_text(content)
    with pytest.raises(OptionError, match=why):
        next(read_trace("odd.json"))


def test_a_missing_trace_or_a_directory_is_an_error_that_helps():
    trace_run("run/trace.json")
    with pytest.raises(
        OptionError,
        match=r"There is no trace run/trac.json. Did you mean 'trace.json'\? A run writes one with --trace",
    ):
        next(read_trace("run/trac.json"))
    with pytest.raises(OptionError, match=r"run is a directory; name a trace. There are: run/trace.json"):
        next(read_trace("run"))


def as_rank(path: str, rank: int, later: int = 0) -> Path:
    """The same trace as if another process had written it; `later` nanoseconds of the day after the first, by a clock of its own."""
    made = Path(f"rank{rank}.json")
    records = load(path)
    for each in records:
        each["pid"] = rank
        if each["name"] == "hookline" and later:
            each["args"]["clock_ns"] += 5_000_000_000
            each["args"]["unix_ns"] += later
        elif later and "ts" in each:
            each["ts"] += 5_000_000
    made.write_text("[" + ",\n".join(json.dumps(each, separators=(",", ":")) for each in records) + "\n]\n")
    return made


def test_ranks_of_one_machine_are_put_side_by_side_as_they_are():
    trace_run()
    assert merge([Path("trace.json"), as_rank("trace.json", 1)], Path("both.json")) == 2 * len(
        load("trace.json")
    )
    both = load("both.json")
    assert {each["pid"] for each in both} == {0, 1}
    assert [each.get("ts") for each in both if each["pid"] == 1] == [
        each.get("ts") for each in load("trace.json")
    ]
    assert list(read_trace("both.json")) == both


def test_ranks_of_another_machine_are_moved_to_the_time_of_day():
    trace_run()
    merge([Path("trace.json"), as_rank("trace.json", 1, later=2_000_000_000)], Path("both.json"))
    both = load("both.json")
    first = [each["ts"] for each in both if each["pid"] == 0 and "ts" in each]
    second = [each["ts"] for each in both if each["pid"] == 1 and "ts" in each]
    assert [b - a for a, b in zip(first, second, strict=True)] == pytest.approx([2_000_000] * len(first))


def test_merging_writes_over_nothing_but_traces():
    trace_run()
    Path("notes.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"notes.txt exists and is not a trace"):
        merge([Path("trace.json")], Path("notes.txt"))
    with pytest.raises(OptionError, match="is one of the traces to merge"):
        merge([Path("trace.json")], Path("./trace.json"))
    with pytest.raises(OptionError, match=r"There is no trace other.json"):
        merge([Path("trace.json"), Path("other.json")], Path("out.json"))
    assert not Path("out.json").exists()


def test_a_merged_trace_that_cannot_be_written_is_an_error_in_words(capsys):
    trace_run()
    assert main(["trace", "trace.json", "--out", "no/such/x.json"]) == 2
    assert "no/such/x.json could not be written: No such file or directory." in capsys.readouterr().err


@pytest.mark.parametrize(
    "damaged",
    [
        '{"name":"watch","cat":"hook","ph":"X","pid":0,"args":{"step":1}}',
        '{"name":"watch","cat":"hook","ph":"X","pid":0,"args":{"step":1},"ts":1.0,"dur":"x"}',
        '{"name":"watch","cat":"hook","ph":"X","pid":0,"args":{"event":["x"]},"ts":1.0,"dur":1.0}',
        '{"name":"on_step_end","cat":"event","ph":"X","pid":0,"args":{"step":"x"},"ts":1.0,"dur":1.0}',
        '{"name":"hookline","ph":"M","pid":0,"args":{}}',
        '{"name":"hookline_plan","ph":"M","pid":0,"args":{"rows":1}}',
        "[" * 100_000,
        '{"name":"watch","cat":["hook"],"ph":"X","pid":0,"args":{"step":1},"ts":1.0,"dur":1.0}',
        '{"name":"watch","cat":"hook","ph":"i","pid":0,"args":{}}',
        '{"name":"on_step_end","cat":"event","ph":"X","pid":[0],"args":{"step":1},"ts":1.0,"dur":1.0}',
        f'{{"name":"watch","cat":"hook","ph":"X","pid":0,"args":{{"step":1}},"ts":1{"0" * 400},"dur":1.0}}',
        '{"name":"hookline","ph":"M","pid":0,"args":{"stage":"fit","rank":0,"world_size":1,"clock_ns":0,"unix_ns":"x"}}',
    ],
    ids=shown,
)
def test_a_damaged_line_is_passed_over(damaged):
    whole = trace_run()
    first, rest = Path("trace.json").read_text().split("\n", 1)
    Path("trace.json").write_text(f"{first}\n{damaged},\n{rest}")
    assert list(read_trace("trace.json")) == whole
    beside(count(read_trace("trace.json")))


def test_of_ranks_that_were_put_together_the_first_is_counted():
    trace_run()
    text = Path("trace.json").read_text()
    Path("other.json").write_text(text.replace('"pid":0', '"pid":1').replace('"rank":0', '"rank":1'))
    merge([Path("trace.json"), Path("other.json")], Path("all.json"))
    assert count(of_first_rank(read_trace("all.json"))).events == count(read_trace("trace.json")).events
