"""Options that are tables, and older options that are keys of them now."""

from __future__ import annotations

from typing import Any

import pytest

from hookline import OptionError, Trainer
from hookline.run.option_tables import Audit, Digests, parse_audit, parse_digest, with_new_names


@pytest.mark.parametrize(
    ("given", "means"),
    [
        (True, Audit(changes=True)),
        (False, Audit()),
        ({"costs": False}, Audit(costs=False)),
        ({"changes": True, "costs": False}, Audit(changes=True, costs=False)),
    ],
)
def test_what_audit_means(given: Any, means: Audit) -> None:
    assert parse_audit(given) == means


@pytest.mark.parametrize(
    ("given", "new"),
    [
        ({"accounting": False}, {"audit": {"costs": False}}),
        ({"accounting": False, "audit": True}, {"audit": {"changes": True, "costs": False}}),
        ({"trace": "t.json"}, {"audit": {"trace": "t.json"}}),
        ({"trace": True, "audit": True}, {"audit": {"changes": True, "trace": True}}),
        ({"hang_action": "abort"}, {"hang_after": {"action": "abort"}}),
        ({"max_epochs": 3}, {"max_epochs": 3}),
    ],
)
def test_an_older_name_is_a_key_of_the_new_option(given: dict[str, Any], new: dict[str, Any]) -> None:
    assert with_new_names(given) == new


def test_an_older_name_beside_a_table_is_refused_with_the_table_to_pass() -> None:
    with pytest.raises(OptionError, match=r"Pass audit={'changes': True, 'costs': False}"):
        Trainer(accounting=False, audit={"changes": True})  # type: ignore[call-arg]


def test_without_accounting_calls_are_not_counted() -> None:
    assert Trainer(accounting=False, enable_progress_bar=False).plan.accounting is False  # type: ignore[call-arg]
    assert Trainer(audit=True, enable_progress_bar=False).plan.accounting is True


@pytest.mark.parametrize(
    ("given", "means", "steps"),
    [
        (False, Digests(every=0), 0),
        (True, Digests(every=1), 1),
        (7, Digests(every=7), 7),
        ("every 10 steps", Digests(every=10), 10),
        ("1k steps", Digests(every=1000), 1000),
        ({"every": "3 steps", "modules": True}, Digests(every=3, modules=True), 3),
        ({"modules": True}, Digests(modules=True), 1),
    ],
    ids=str,
)
def test_what_digest_means(given: Any, means: Digests, steps: int) -> None:
    assert parse_digest(given) == means
    assert parse_digest(given).steps == steps


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("every 10 epochs", "digest='every 10 epochs' must be True, False, a number of steps or text"),
        (-1, "digest=-1 must be True, False, a number of steps or text such as 'every 10 steps'"),
        (2.5, "or a table of every, modules"),
        ({"evry": 2}, "digest has no setting 'evry'. Did you mean 'every'"),
        ({"modules": 1}, "digest: modules=1 must be True or False"),
    ],
    ids=str,
)
def test_a_wrong_interval_of_digests_is_refused_with_what_is_allowed(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Trainer(digest=given)
