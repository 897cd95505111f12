"""What hooks reach as trainer in a loop that is not Hookline's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dialects.looped import net_and_sgd, train
from tiny import batches

import hookline
from hookline import Hook, Line


def test_a_part_of_the_trainer_that_the_host_has_not_is_refused_when_the_hook_is_added() -> None:
    class Mixes(Hook):
        def on_step_end(self, state: Any) -> None:
            state.trainer.loaders.set_weights({})

    with pytest.raises(
        hookline.HookError,
        match=r"'mixes' \(Mixes\) needs trainer.loaders in Mixes.on_step_end, which a loop",
    ):
        Line(*net_and_sgd()).add_hook(Mixes())


def test_what_is_asked_for_with_care_is_no_reason_to_refuse() -> None:
    class Careful(Hook):
        def on_step_end(self, trainer: Any) -> None:
            if hasattr(trainer, "loaders"):
                trainer.loaders.set_weights({})

    net, sgd = net_and_sgd()
    train(Line(net, sgd, hooks=[Careful()]), net, sgd, batches(1))


def test_a_trainer_s_part_that_is_not_there_is_named_when_it_is_asked_for() -> None:
    with pytest.raises(
        AttributeError, match=r"hookline.Line has no attribute 'max_epoch' \(in hooks trainer.max_epoch\)"
    ):
        _ = Line(*net_and_sgd()).max_epoch


def test_messages_and_the_plan_of_a_line_speak_of_the_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, sgd = net_and_sgd()
    with Line(net, sgd, run_dir=tmp_path) as line, caplog.at_level("INFO", "hookline"):
        line.load_checkpoint("auto")
        assert str(line.explain()).startswith("a loop with hookline.Line\n")
    assert caplog.messages[0].startswith("line.load_checkpoint('auto'): there is no checkpoint below")
    assert "resume=" not in caplog.text
