"""What hooks cost is counted, shown at the end of a fit, and in the run's log."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from tiny import Net, batches, quiet

from hookline import Hook, Trainer
from hookline.engine.cost import SHOWN_COSTS, Cost, Costs, format_seconds, slow_hooks


class Slow(Hook):
    def on_train_batch_end(self):
        time.sleep(0.1)


class Quick(Hook):
    def on_train_batch_end(self): ...


def shown(**options) -> Trainer:
    return Trainer(**{"max_epochs": 1, "num_sanity_val_steps": 0, "logger": False, **options})


def test_a_fit_ends_with_a_table_that_names_the_slow_hook(capfd):
    shown(hooks=[Slow(), Quick()]).fit(Net(), batches(4))
    lines = capfd.readouterr().err.splitlines()
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("Hooks took")) :]
    assert table[1].split() == ["hook", "event", "calls", "total", "mean", "worst", "share"]
    assert ["slow", "on_train_batch_end", "4"] in [line.split()[:3] for line in table]
    assert any(
        line.startswith("  slow: slow, ") and line.endswith("% of the training time") for line in table
    )
    assert not any("slow: quick" in line for line in table)


def test_no_hook_of_an_audited_fit_is_called_slow(capfd):
    trainer = shown(hooks=[Slow(), Quick()], audit=True)
    trainer.fit(Net(), batches(4))
    for table in (capfd.readouterr().err, str(trainer.hooks.cost())):
        assert "Hooks took" in table and "The times include the audit" in table
        assert "slow: " not in table


def test_a_fit_without_a_bar_or_without_other_hooks_than_the_bar_shows_no_table(capfd):
    quiet(hooks=[Slow()]).fit(Net(), batches(1))
    shown().fit(Net(), batches(1))
    trainer = shown(hooks=[Slow()])
    trainer.validate(Net(), batches(1))
    assert "Hooks took" not in capfd.readouterr().err
    costs = trainer.hooks.cost()
    assert " of validate()" in str(costs) and " of validate()" in costs._repr_html_()
    assert "training" not in str(costs) and "training" not in costs._repr_html_()


def test_a_fit_that_fails_shows_what_the_hooks_had_cost_by_then(capfd):
    trainer = shown(hooks=[Quick()])
    with pytest.raises(ZeroDivisionError), trainer.on("step_end")(lambda: 1 / 0):
        trainer.fit(Net(), batches(2))
    assert "quick  " in capfd.readouterr().err


def test_the_share_is_of_the_training_time_and_stands_still_when_it_is_over():
    trainer = quiet(hooks=[Slow()])
    during = []
    trainer.on("train_end")(lambda: during.extend(trainer.hooks.cost()))
    trainer.fit(Net(), batches(4))
    slow = trainer.hooks.cost()[0]
    assert (slow.hook, slow.calls) == ("slow", 4)
    assert 0 < slow.share <= 1
    assert slow.share == trainer.hooks.cost()[0].share
    assert during[0].share >= slow.share  # less of the run was over by then
    assert slow.share == pytest.approx(slow.seconds / trainer.hooks.stopwatch.seconds)


def test_the_log_has_the_table_with_the_hooks_that_the_module_brought():
    class Brings(Net):
        def configure_hooks(self):
            return [Quick()]

    trainer = quiet(hooks=[Slow()], logger=True, run_dir="run")
    trainer.fit(Brings(), batches(2))
    records = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    (cost,) = [each for each in records if each["type"] == "cost"]
    assert {(row["hook"], row["event"], row["calls"]) for row in cost["rows"]} == {
        ("slow", "on_train_batch_end", 2),
        ("quick", "on_train_batch_end", 2),
    }
    slow = cost["rows"][0]
    assert set(slow) == {"hook", "event", "calls", "total", "mean", "worst", "share"}
    assert slow["total"] == pytest.approx(slow["mean"] * 2) and slow["worst"] <= slow["total"]
    assert slow["share"] == pytest.approx(slow["total"] / cost["seconds"])


def test_only_the_most_expensive_rows_are_shown_and_the_rest_is_summed_up():
    rows = [Cost(f"hook_{n}", "on_step_end", 10, 1 / (n + 1), 0.1, 0.01) for n in range(SHOWN_COSTS + 3)]
    text = Costs(rows, 100.0).table()
    assert f"hook_{SHOWN_COSTS - 1}" in text and f"hook_{SHOWN_COSTS} " not in text
    assert "and 3 more" in text
    text = Costs(rows[:1], 0.5).table()  # most of it before the training
    assert text.startswith("Hooks took 1.0 s, what they do before it included; the training took 500.0 ms:")


def test_a_hook_is_slow_by_all_its_events_together_but_not_in_a_blink():
    rows = [
        Cost("two", "on_step_end", 10, 1.0, 0.1, 0.03),
        Cost("two", "on_train_batch_end", 10, 1.0, 0.1, 0.03),
        Cost("blink", "on_step_end", 10, 0.01, 0.001, 0.9),
        Cost("light", "on_step_end", 10, 1.0, 0.1, 0.01),
    ]
    assert slow_hooks(rows) == {"two": pytest.approx(0.06)}


def test_a_cost_that_comes_once_does_not_make_a_hook_slow():
    once = Cost("progress_bar", "on_validation_start", 3, 0.11, 0.105, 0.08)
    assert slow_hooks([once, Cost("progress_bar", "on_fit_start", 1, 0.2, 0.2, 0.15)]) == {}
    assert list(slow_hooks([Cost("all", "on_validation_start", 3, 3.0, 1.1, 0.08)])) == ["all"]


def test_a_finished_run_that_is_started_again_shows_neither_costs_nor_times(capfd):
    shown(hooks=[Quick()], run_dir="run").fit(Net(), batches(2))
    said = capfd.readouterr().err
    assert "Hooks took" in said and "Time: " in said
    shown(hooks=[Quick()], run_dir="run").fit(Net(), batches(2), resume="auto")
    said = capfd.readouterr().err
    assert "Hooks took" not in said and "Time: " not in said and "Model: " in said


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1234.5, "1234 s"), (2.0, "2.0 s"), (0.0031, "3.1 ms"), (0.00085, "850 µs"), (0, "0 µs")],
)
def test_times_read_well(seconds, text):
    assert format_seconds(seconds) == text


class Validates(Hook):
    """Validates in the middle of the run, and hears that validation itself."""

    def on_step_end(self, trainer, step):
        if step == 2:
            trainer.validate()

    def on_validation_batch_end(self):
        time.sleep(0.02)


def test_what_hooks_do_inside_another_ones_call_is_summed_up_once(capsys):
    trainer = quiet(hooks=[Validates()], enable_progress_bar=True)
    trainer.fit(Net(), batches(4), batches(3))
    rows = {row.event: row for row in trainer.hooks.cost() if row.hook == "validates"}
    inside = 3 * 0.02
    assert rows["on_step_end"].seconds > inside and rows["on_validation_batch_end"].seconds > 2 * inside
    watch = trainer.hooks.stopwatch
    assert inside < watch.counted_twice < rows["on_step_end"].seconds
    assert float(re.search(r"of training, ([\d.]+)%", capsys.readouterr().err)[1]) <= 100


def test_a_hook_that_is_switched_off_and_on_continues_where_it_was():
    heard = []
    trainer = quiet()
    trainer.on("step_end", once=True, name="first")(lambda step: heard.append(step))
    trainer.on("step_end", name="all")(lambda step: None)

    @trainer.on("train_batch_start")
    def switch(batch_idx):
        for name in ("first", "all"):
            if batch_idx in (2, 4):
                (trainer.disable_hook if batch_idx == 2 else trainer.enable_hook)(name)

    trainer.fit(Net(), batches(6))
    assert heard == [1]
    assert next(row.calls for row in trainer.hooks.cost() if row.hook == "all") == 4


def test_a_notebook_shows_costs_as_a_table_and_one_line_names_the_most_expensive_hooks():
    rows = [
        Cost("progress_bar", "on_step_end", 10, 2.0, 0.1, 0.02),
        Cost("<b>", "on_step_end", 1, 1.0, 1.0, 0.01),
    ]
    costs = Costs(rows, seconds=100.0)
    assert costs.headline() == "Hooks took 3.0% of the training time: progress_bar 2.0%, <b> 1.0%"
    shown = costs._repr_html_()
    assert "<table" in shown and "&lt;b&gt;" in shown and shown.count("<tr>") == 3
    assert Costs().headline() == "Hooks took 0.0% of the training time"
