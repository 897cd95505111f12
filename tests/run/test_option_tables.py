"""Options that are tables, and older options that are keys of them now."""

from __future__ import annotations

from typing import Any

import pytest

from hookline import OptionError, Trainer
from hookline.run.option_tables import Audit, parse_audit, with_new_names


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
