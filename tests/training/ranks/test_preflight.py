"""Ranks that start differently are told what differs before anything runs."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from torch import distributed as dist

from hookline import HooklineError
from hookline.distributed.comm import Ranks
from hookline.training.ranks import preflight
from hookline.training.ranks.preflight import absent, compare_starts, differing, wait_for_keys


def start(exchanges: int = 3, **about: str) -> dict[str, Any]:
    return {"exchanges": exchanges, "about": about}


def test_what_differs_is_named_with_the_value_of_each_rank() -> None:
    tables = [{"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "1", "b": "x"}]
    assert [*differing(tables, lambda name: f"the option {name}")] == [
        "the option b is x on ranks 0, 2, y on rank 1"
    ]
    assert [*differing([{"a": "1"}, {}], str)] == ["a is 1 on rank 0, nothing on rank 1"]
    assert [*differing(tables[::2], str)] == []


def test_what_some_ranks_lack_is_named_with_those_that_have_it() -> None:
    one, other = ["on_step_end", "mine"], ["on_fit_end", "mine"]
    assert [*absent([[one, other], [other], [one, other]])] == [(tuple(one), [0, 2], [1])]
    assert [*absent([[one, other], [other, one]])] == []


def test_ranks_that_start_alike_are_no_error() -> None:
    assert compare_starts([start(stage="fit")] * 2, dist.HashStore()) == ("", "")


def test_only_the_first_difference_is_told() -> None:
    _, text = compare_starts([start(stage="fit", path="a"), start(stage="test", path="b")], dist.HashStore())
    assert "stage is fit on rank 0, test on rank 1" in text and "path" not in text


def test_ranks_out_of_step_are_told_of_the_failure_before() -> None:
    store = dist.HashStore()
    text, other = compare_starts([start(3), start(5)], store)
    assert (
        "one rank has begun 5 exchanges, another 3" in text and "An earlier run failed," in text and not other
    )
    store.set("failure", "rank 1 (ValueError)")
    assert "failed on rank 1 (ValueError)" in compare_starts([start(3), start(5)], store)[0]


def test_a_url_is_compared_as_a_whole_but_shown_without_its_secrets() -> None:
    one, other = (preflight._public_text(f"https://x.org/last?key={key}") for key in ("s3cret", "0ther"))
    assert one != other and "s3cret" not in one and "0ther" not in other
    assert preflight._public_text("runs/a") == "runs/a"


def test_keys_are_returned_once_all_are_there() -> None:
    store = dist.HashStore()
    for key in ("1/0", "1/1"):
        store.set(key, "")
    assert wait_for_keys(Ranks(timeout=60), store, "fit", ["1/0", "1/1"]) == ["1/0", "1/1"]


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "describe_ended_ranks", lambda world_size: "")  # no process has ended
    store = dist.HashStore()
    store.set("1/0", "")
    with pytest.raises((HooklineError, dist.DistError), match=r"Not all ranks have called fit\(\).*rank 1"):
        wait_for_keys(Ranks(world_size=2, timeout=0.1), store, "fit", ["1/0", "1/1"])


def test_a_rank_that_has_ended_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=60))
    monkeypatch.setattr(preflight, "describe_ended_ranks", lambda world_size: "rank 1 by ValueError")
    with pytest.raises(HooklineError, match=r"fit\(\) needs all ranks.*rank 1 by ValueError"):
        wait_for_keys(Ranks(world_size=2, timeout=3600), store, "fit", ["1/1"])
