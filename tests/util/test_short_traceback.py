"""A notebook shows an error without the frames of Hookline; a terminal and a program show all of them."""

from __future__ import annotations

import builtins
import traceback
import types
from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Module


class Shell:
    """Stands for IPython's shell: shows the frames and the notes of an error."""

    def __init__(self) -> None:
        self.InteractiveTB = self

    def structured_traceback(self, kind: Any, error: Any, trace: Any, tb_offset: int) -> list[str]:
        names = [each.name for each in traceback.extract_tb(trace)]
        return [*names[tb_offset:], *getattr(error, "__notes__", ())]


class Broken(Net):
    """Fails in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("on purpose, at once. See above.")


def cell(module: Module) -> Any:
    """Run a fit as a cell of a notebook does, and return the error."""
    try:
        quiet(max_steps=1).fit(module, batches())
    except Exception as error:
        return error


def test_a_notebook_shows_the_frames_of_the_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    error = cell(Broken())
    shown = error._render_traceback_()
    assert shown[:2] == ["cell", "training_step"]
    assert shown[2] == "batch: float32[3, 4], float32[3, 2]"
    assert shown[3:] == ["Failed at epoch 0, batch 0, step 0, rank 0."]  # the message is right above it
    assert "on purpose" in error.__notes__[-1]  # the error itself is unchanged
    assert len(traceback.extract_tb(error.__traceback__)) > 5
    monkeypatch.setenv("HOOKLINE_FULL_TRACEBACK", "1")
    assert "fit" in error._render_traceback_()


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_an_interrupt_shows_the_frames_of_the_user_only(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    class Interrupted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyboardInterrupt

        validation_step = test_step = predict_step = training_step

    shell = Shell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    with pytest.raises(KeyboardInterrupt) as ended:
        getattr(quiet(), stage)(Interrupted(), batches())
    shown = ended.value._render_traceback_()  # type: ignore[attr-defined]
    names = [each for each in shown if each.isidentifier()]
    assert names == ["test_an_interrupt_shows_the_frames_of_the_user_only", "training_step"]


def test_an_interrupt_of_hooklines_own_code_shows_where_the_user_called_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hookline.training import evaluate

    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    interrupted = types.FunctionType(  # as if it were a function of Hookline
        interrupted.__code__.replace(co_filename=evaluate.__file__), globals(), "interrupted"
    )
    shell = Shell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    with pytest.raises(KeyboardInterrupt) as ended:
        quiet().validate(Net(), (interrupted() for _ in range(2)))
    assert "interrupted" not in ended.value._render_traceback_()  # type: ignore[attr-defined]


def test_an_attribute_that_the_trainer_does_not_have_shows_no_frame_of_hookline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = Shell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    with pytest.raises(AttributeError, match="no attribute 'metrcs'. Did you mean 'metrics'?") as missing:
        _ = quiet().metrcs  # type: ignore[attr-defined]
    missing.value.add_note("noted")
    shown = missing.value._render_traceback_()  # type: ignore[attr-defined]
    assert shown == ["test_an_attribute_that_the_trainer_does_not_have_shows_no_frame_of_hookline", "noted"]
    assert "".join(traceback.format_exception(missing.value)).count("Did you mean") == 1


def test_an_error_of_hookline_shows_no_frame_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoSteps(Net):
        def configure_optimizers(self) -> Any:
            return []

    shell = Shell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    shown = cell(NoSteps())._render_traceback_()
    assert [each for each in shown if " " not in each] == ["cell"]


def test_a_program_and_a_terminal_show_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(cell(Broken()), "_render_traceback_")

    class TerminalInteractiveShell(Shell): ...

    shell = TerminalInteractiveShell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert not hasattr(cell(Broken()), "_render_traceback_")
