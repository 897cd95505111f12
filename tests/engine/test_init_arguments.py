"""What a module was made with is recorded when it is made, whatever it does with its arguments."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
import typing
from typing import Any, Generic, TypeVar

import pytest
import torch
from tiny import Net
from torch import nn

from hookline import DataModule, Module
from hookline.engine.init_arguments import InitArguments, init_arguments

T = TypeVar("T")


class Sized(Module):
    """Keeps none of its arguments."""

    def __init__(self, width: int, /, depth: int = 2, *sizes: int, name: str = "net", **more: Any) -> None:
        """Says what it is for."""
        super().__init__()


def recorded(made: Any) -> dict[str, Any]:
    found = init_arguments(made)
    assert found is not None
    return found.recorded


def test_arguments_are_recorded_however_they_are_given_defaults_included() -> None:
    assert recorded(Sized(3)) == {"width": 3, "depth": 2, "name": "net"}
    assert recorded(Sized(3, depth=4, name="x")) == {"width": 3, "depth": 4, "name": "x"}
    assert recorded(Sized(3, 4, 5, 6, lr=0.1, betas=(0.9, 0.99))) == {
        "width": 3,
        "depth": 4,
        "sizes": (5, 6),
        "name": "net",
        "lr": 0.1,
        "betas": (0.9, 0.99),
    }


def test_the_outermost_call_counts() -> None:
    class Wide(Sized):
        def __init__(self, factor: float) -> None:
            super().__init__(int(factor * 10), depth=7)

    class Wider(Wide):
        def __init__(self, scale: float) -> None:
            super().__init__(scale * 2)

    class Silent(Wider): ...

    assert recorded(Wide(0.5)) == {"factor": 0.5}
    assert recorded(Wider(1.5)) == recorded(Silent(1.5)) == {"scale": 1.5}


def test_classes_beside_the_module_may_have_the_init() -> None:
    class Mixin:
        def __init__(self, colour: str, **more: Any) -> None:
            super().__init__(**more)
            self.mixed = colour

    class First(Mixin, Module): ...

    class FromTorch(nn.Linear, Module): ...  # type: ignore[misc]

    class Typed(Module, Generic[T]):
        def __init__(self, value: T) -> None:
            super().__init__()

    first = First("red")
    assert recorded(first) == {"colour": "red"} and first.mixed == "red"
    assert list(inspect.signature(First).parameters) == ["colour", "more"]
    assert recorded(FromTorch(4, 2))["in_features"] == 4
    assert recorded(Typed[int](3)) == {"value": 3}


def test_what_an_init_does_with_its_arguments_does_not_change_the_record() -> None:
    class Changes(Module):
        def __init__(self, sizes: list[int], options: dict[str, Any], width: int = 1) -> None:
            super().__init__()
            sizes.append(9)
            options["deep"].clear()
            width = 5
            self.width = width

    assert recorded(Changes([1, 2], {"deep": [3]})) == {"sizes": [1, 2], "options": {"deep": [3]}, "width": 1}


def test_of_what_is_no_plain_value_the_type_is_recorded_and_nothing_is_kept_alive() -> None:
    class Given(Module):
        def __init__(self, backbone: nn.Module, activation: Any = torch.relu, tag: Any = None) -> None:
            super().__init__()

    backbone = nn.Linear(2, 2)
    made = Given(backbone, tag={1, 2})
    assert init_arguments(made) == InitArguments(
        {}, {"backbone": "a torch.nn.modules.linear.Linear", "tag": "a builtins.set"}
    )
    assert list(made.children()) == [] and list(made.state_dict()) == []
    found = init_arguments(Given(backbone, torch.relu))
    assert found is not None and list(found.left_out) == ["backbone"]  # the default will be there again


def test_a_call_that_python_refuses_is_refused_by_python() -> None:
    with pytest.raises(
        TypeError, match=r"Sized.__init__\(\) missing 1 required positional argument: 'width'"
    ):
        Sized()  # type: ignore[call-arg]


def test_an_object_that_is_created_without_its_class_being_called_has_no_record() -> None:
    made = Sized.__new__(Sized)
    made.__init__(3)  # type: ignore[misc]
    assert init_arguments(made) is None

    class Cached(Sized):
        def __new__(cls, name: str = "x") -> Any:
            return super().__new__(cls)

        def __init__(self, name: str = "y") -> None:
            super().__init__(3)

    assert init_arguments(Cached("z")) is None  # not the default, which the class was not called with


def test_the_code_of_an_init_can_be_replaced_in_place_as_autoreload_does() -> None:
    class Edited(Module):
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.size = width

    before, old = Edited(3), Edited

    class Edited(Module):  # type: ignore[no-redef]
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.size = width * 10

    for name in ("__code__", "__defaults__", "__dict__"):
        setattr(old.__init__, name, getattr(Edited.__init__, name))
    before.__class__ = Edited
    made = old(4)
    assert made.size == 40 and recorded(made) == {"width": 4}
    assert isinstance(before, Edited) and recorded(before) == {"width": 3}
    before.__init__(5)  # type: ignore[misc]
    assert before.size == 50


def test_signature_annotations_and_doc_are_those_of_the_init() -> None:
    shown = "(width: 'int', /, depth: 'int' = 2, *sizes: 'int', name: 'str' = 'net', **more: 'Any') -> 'None'"
    assert str(inspect.signature(Sized)) == shown
    assert typing.get_type_hints(Sized.__init__)["width"] is int
    assert Sized.__init__.__doc__ == "Says what it is for."
    assert Sized.__init__.__qualname__ == "Sized.__init__" and Sized.__init__.__module__ == __name__
    assert "super().__init__()" in inspect.getsource(Sized.__init__)


def test_copies_and_pickles_have_the_record_too() -> None:
    made = Net(0.3)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for each in (
        copy.copy(made),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        torch.load(file, weights_only=False),
    ):
        assert recorded(each) == {"lr": 0.3}


def test_the_arguments_of_a_dataclass_are_its_fields() -> None:
    @dataclasses.dataclass(eq=False)
    class Fields(Net):
        width: int = 3
        lr: float = 0.5

        def __post_init__(self) -> None:
            Net.__init__(self, self.lr * 2)

    assert recorded(Fields(4)) == {"width": 4, "lr": 0.5}  # not what Net.__init__ was called with


def test_modules_without_an_init_and_classes_that_do_not_record() -> None:
    class Bare(Module): ...

    class Data(DataModule):
        def __init__(self, size: int = 3) -> None: ...

    assert (
        init_arguments(Bare()) is None
        and init_arguments(Data()) is None
        and init_arguments(nn.Linear(2, 2)) is None
    )


def test_a_compiled_module_computes_the_same() -> None:
    class Forward(Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(4, width)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    net, x = Forward(2), torch.randn(2, 4)
    assert torch.equal(torch.compile(net, backend="eager")(x), net(x))
    assert recorded(net) == {"width": 2}


def test_a_value_that_contains_itself_is_left_out_at_once() -> None:
    value: dict[str, Any] = {str(number): number for number in range(50)}
    value |= {"again": [value, value], "self": value}  # a search that visits it again takes years
    found = init_arguments(Sized(3, value=value))
    assert found is not None and found.left_out == {"value": "a dict that contains itself"}
    assert recorded(Sized(3, value=[[1], [1]]))["value"] == [[1], [1]]
