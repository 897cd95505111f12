"""The rows and the table of what hooks changed."""

from __future__ import annotations

from hookline.engine.changes import MOST_NAMES, ChangeTable, change_table, change_text, observer


def test_a_row_counts_calls_and_keeps_the_first_step_and_the_names() -> None:
    table = ChangeTable()
    table.add("probe", "on_step_end", 3, [("parameters", "a"), ("parameters", "b"), ("gradients", "a")])
    table.add("probe", "on_step_end", 4, [("parameters", "c"), ("parameters", "a")])
    table.add("probe", "on_train_end", 9, [("parameters", "a")])
    assert [(row.event, row.kind, row.names, row.count, row.first_step) for row in table.rows()] == [
        ("on_step_end", "parameters", ["a", "b", "c"], 2, 3),
        ("on_step_end", "gradients", ["a"], 1, 3),
        ("on_train_end", "parameters", ["a"], 1, 9),
    ]


def test_a_row_keeps_some_names_of_very_many() -> None:
    table = ChangeTable()
    for step in range(3):
        table.add("probe", "on_step_end", step, [("parameters", f"{step} {each}") for each in range(15)])
    assert len(table.rows()[0].names) == MOST_NAMES


def test_rows_of_other_ranks_are_shown_with_their_rank() -> None:
    other, own = ChangeTable(rank=1), ChangeTable()
    other.add("probe", "on_step_end", 3, [("parameters", "a")])
    own.add("other", "on_step_end", 1, [("the batch", "batch[0]")])
    own.include(row.data() for table in (own, other) for row in table.rows())
    assert [(row.hook, row.rank) for row in own.rows()] == [("other", 0), ("probe", 1)]
    assert "probe, rank 1" in change_table(own.rows())


def test_changes_in_words() -> None:
    assert change_text([("parameters", "a"), ("parameters", "b"), ("random streams", "torch")]) == (
        "parameters (a, b), random streams (torch)"
    )
    assert change_table([]) == "Audit: no hook has changed anything."


def test_the_decorator_marks_what_it_is_given() -> None:
    @observer
    def looks() -> None: ...

    assert looks.observes is True  # type: ignore[attr-defined]
