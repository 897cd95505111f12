"""What a loop passes to its line: the model, optimizers, schedulers and hooks."""

from __future__ import annotations

from typing import Any

import pytest
from dialects.looped import Counts, net_and_sgd
from torch.optim.lr_scheduler import StepLR

from hookline import HookError, Line, OptionError


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            lambda net, sgd: Line(net, sgd, sgd),
            r"SGD is one argument too many.*Line\(model, \[optimizer, ...",
        ),
        (lambda net, sgd: Line(net, net), "a torch.optim.Optimizer or a list of them, not Linear"),
        (lambda net, sgd: Line(net, type(sgd)), "not SGD, a class"),
        (lambda net, sgd: Line(net, sgd, schedulers="cosine"), "schedulers='cosine': pass a scheduler of"),
        (lambda net, sgd: Line(net, sgd, schedulers=sgd), "pass a scheduler of"),
        (lambda net, sgd: Line(net, [sgd, StepLR(sgd, 1)]), "StepLR is a scheduler.*schedulers="),
        (lambda net, sgd: Line(net, StepLR(sgd, 1)), "StepLR is a scheduler.*schedulers="),
        (lambda net, sgd: Line(net, sgd, [Counts()]), r"by name: Line\(model, optimizer, hooks=\[...\]\)"),
        (lambda net, sgd: Line(net, sgd, callbacks=[]), r"no option 'callbacks'\. Use hooks=\[...\]"),
        (lambda net, sgd: Line(net, sgd, hooks=7), r"hooks= takes a hook or a list of hooks, not int"),
    ],
)
def test_what_is_passed_in_the_wrong_place_is_refused(given: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        given(*net_and_sgd())


def test_one_hook_stands_for_a_list_and_is_found_by_its_name() -> None:
    line = Line(*net_and_sgd(), hooks=Counts())
    assert [each.calls if hasattr(each, "calls") else each.steps for each in line.hooks] == [[]]
    with pytest.raises(HookError, match=r"hooks\[0\]: a hook is found by its name\. Hooks: counts\."):
        line.hooks[0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda line: line.epochs(3.0), r"whole number, not 3\.0\.$"),
        (lambda line: line.epochs([1]), r"not list \(int\)\. The loader is for line\.epoch\(loader\)"),
        (lambda line: line.epoch(3), r"not 3\. Without a loader: .*line\.epoch\(range\(3\)\)"),
    ],
)
def test_a_loop_over_something_else_is_refused(call: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text), Line(*net_and_sgd()) as line:
        next(call(line))


def test_a_checkpoint_is_loaded_by_its_path() -> None:
    with pytest.raises(OptionError, match="True.*pass 'auto', 'best' or"), Line(*net_and_sgd()) as line:
        line.load_checkpoint(True)  # type: ignore[arg-type]
