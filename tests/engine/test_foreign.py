"""Objects of other packages are recognised by their class, without an import."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from hookline.engine import foreign
from hookline.engine.foreign import (
    DATA_BASES,
    HOOK_BASES,
    MODULE_BASES,
    ForeignBase,
    adopt,
    adopt_data,
    adopt_steps,
)


class Adapted:
    """Stands for an adapter, so that no other package has to be there."""

    def __init__(self, original: Any) -> None:
        self.original = original


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adapters_of_a_test", type(sys)("adapters_of_a_test"))
    sys.modules["adapters_of_a_test"].Adapted = Adapted  # type: ignore[attr-defined]
    kind = ForeignBase(("kit", "kit_core"), "Callback", "adapters_of_a_test:Adapted")
    for name in ("HOOK_BASES", "MODULE_BASES", "DATA_BASES"):
        monkeypatch.setattr(foreign, name, (kind,))


def base(name: str, module: str) -> type:
    return type(name, (), {"__module__": module})


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("module", ["kit", "kit.callbacks.early", "kit_core.x"])
def test_a_subclass_is_adapted_wherever_in_the_package_its_base_is(module: str) -> None:
    class Mine(base("Callback", module)):  # type: ignore[misc]
        pass

    class Below(Mine): ...

    assert foreign.is_hook_class(Below) and foreign.is_data_class(Below)
    for given in (Mine(), Below()):
        for adapted in (adopt(given), adopt_steps(given), adopt_data(given)):
            assert type(adapted) is Adapted and adapted.original is given


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize(
    ("name", "module"), [("Callback", "kitchen.x"), ("Callback", "mine.kit"), ("Other", "kit")]
)
def test_everything_else_is_left_as_it_is(name: str, module: str) -> None:
    cls = base(name, module)
    given = cls()
    assert adopt(given) is given and adopt_data(given) is given and adopt_steps(given) is None
    assert not foreign.is_hook_class(cls) and not foreign.is_data_class(cls)


@pytest.mark.parametrize(
    "kind", [*HOOK_BASES, *MODULE_BASES, *DATA_BASES], ids=lambda kind: f"{kind.packages[0]}.{kind.name}"
)
def test_every_adapter_is_there_and_imports_no_other_package(kind: ForeignBase) -> None:
    module, _, name = kind.adapter.partition(":")
    before = set(sys.modules)
    assert callable(getattr(importlib.import_module(module), name))
    assert not set(kind.packages) & (set(sys.modules) - before)
