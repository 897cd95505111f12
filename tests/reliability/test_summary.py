"""What a run leaves behind: skips and failures in its log, and last words that say what failed, what was saved and how to continue."""

from __future__ import annotations

import json
import os
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, SavesFirstEpoch, batches, quiet

from hookline import SKIP_STEP, CheckpointError, Hook, HooklineError, OptionError, Trainer
from hookline.cli import main
from hookline.hooks import EarlyStopping, ModelCheckpoint
from hookline.reliability.summary import end_summary
from hookline.training.batch_events import FIRST_SKIPS


def records(kind: str) -> list[dict]:
    return [
        each
        for each in map(json.loads, Path("run/log.jsonl").read_text().splitlines())
        if each["type"] == kind
    ]


def logged(**options) -> Trainer:
    return quiet(**{"logger": True, "run_dir": "run", **options})


class Fails(Hook):
    def __init__(self, step=3):
        self.step = step

    def on_step_end(self, step):
        if step == self.step:
            raise RuntimeError("broken on purpose")


# ---- in the log ---------------------------------------------------------------------------------------------------


def test_every_skipped_update_is_in_the_log_with_its_reason():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    trainer = logged()
    trainer.on("before_optimizer_step")(lambda batch_idx: SKIP_STEP if batch_idx == 2 else None)
    trainer.fit(Skips(), batches(4))
    assert [(each["step"], each["batch"], each["reason"], each["number"]) for each in records("skip")] == [
        (1, 1, "no_loss", 1),
        (1, 2, "hook", 2),
    ]


def test_a_run_that_skips_all_the_time_does_not_fill_its_log():
    trainer = logged()
    trainer.on("before_optimizer_step")(lambda: SKIP_STEP)
    trainer.fit(Net(), batches(3 * FIRST_SKIPS))
    assert [each["number"] for each in records("skip")][-2:] == [2 * FIRST_SKIPS, 3 * FIRST_SKIPS]
    assert len(records("skip")) == FIRST_SKIPS + 2


def test_a_failure_is_in_the_log_with_who_failed_where():
    with pytest.raises(RuntimeError):
        logged(hooks=[Fails()]).fit(Net(), batches(5))
    (failure,) = records("failure")
    assert {
        key: failure[key] for key in ("step", "epoch", "rank", "exception", "message", "who", "event")
    } == {
        "step": 3,
        "epoch": 0,
        "rank": 0,
        "exception": "RuntimeError",
        "message": "broken on purpose",
        "who": "hook 'fails'",
        "event": "on_step_end",
    }
    assert [row["hook"] for row in records("cost")[0]["rows"]] == ["fails"]


def test_a_failing_step_is_the_modules_and_has_no_hook_to_blame():
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data") as failed:
        logged().fit(Breaks(), batches(2))
    assert "who" not in records("failure")[0]
    assert (
        end_summary(failed.value).note()
        == "Failed: ValueError: no data, at epoch 0, batch 0, step 0, rank 0."
    )


def test_the_note_has_the_first_sentence_because_the_error_has_all():
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("no data. Download it first.")

    with pytest.raises(ValueError, match="Download it first") as failed:
        logged().fit(Breaks(), batches(2))
    assert (
        end_summary(failed.value).note()
        == "Failed: ValueError: no data, at epoch 0, batch 0, step 0, rank 0."
    )
    assert records("failure")[0]["message"] == "no data. Download it first."


def test_rows_say_whether_they_are_values_of_a_step_or_means():
    logged(log_every_n_steps=1).fit(Net(), batches(2), batches(1))
    assert [(each["over"], sorted(each["metrics"])) for each in records("metrics")] == [
        ("step", ["lr", "train/loss"]),
        ("step", ["lr", "train/loss"]),
        ("evaluation", ["val/loss"]),
        ("epoch", ["train/loss"]),
    ]


# ---- the last words -----------------------------------------------------------------------------------------------


def test_the_last_lines_of_a_traceback_say_what_failed_what_was_saved_and_how_to_resume():
    saves = SavesFirstEpoch()
    with pytest.raises(RuntimeError) as failed:
        logged(hooks=[saves, Fails(5)], max_epochs=2).fit(Net(), batches(3))
    assert "".join(traceback.format_exception(failed.value)).splitlines()[-3:] == [
        "Failed: RuntimeError: broken on purpose, in hook 'fails', on_step_end, epoch 1, batch 1, step 5, rank 0.",
        f"Saved: {saves.path}, at step 3.",
        f"To resume: trainer.fit(module, ..., resume={str(saves.path)!r})",
    ]


def test_with_resume_auto_the_same_command_resumes():
    with pytest.raises(RuntimeError) as failed:
        logged(hooks=[SavesFirstEpoch(), Fails(5)], max_epochs=2).fit(Net(), batches(3), resume="auto")
    assert (
        "\nTo resume: run the same command again, because resume='auto' finds this"
        in failed.value.__notes__[-1]
    )


def test_a_checkpoint_elsewhere_is_named_though_resume_is_auto():
    trainer = logged(hooks=[Fails(5)])
    trainer.on("step_end")(lambda step: trainer.save_checkpoint("elsewhere/a") if step == 3 else None)
    with pytest.raises(RuntimeError) as failed:
        trainer.fit(Net(), batches(6), resume="auto")
    assert "To resume: trainer.fit(module, ..., resume='elsewhere/a')" in failed.value.__notes__[-1]


def test_what_the_last_line_says_works():
    saves = SavesFirstEpoch()
    with pytest.raises(RuntimeError) as failed:
        logged(hooks=[saves, Fails(5)], max_epochs=2).fit(Net(), batches(3))
    trainer = logged(max_epochs=2)
    trainer.fit(Net(), batches(3), resume=end_summary(failed.value).saved)
    assert (trainer.status, trainer.global_step) == ("completed", 6)


def test_a_run_that_fails_again_after_a_resume_can_be_resumed_from_where_it_began():
    saves = SavesFirstEpoch()
    quiet(hooks=[saves], run_dir="run").fit(Net(), batches(3))
    with pytest.raises(RuntimeError) as failed:
        quiet(hooks=[Fails(4)], run_dir="run", max_epochs=2).fit(Net(), batches(3), resume=saves.path)
    assert f"Saved: {saves.path}, which this run began with." in failed.value.__notes__[-1]


def test_a_checkpoint_that_the_failure_asked_for_is_the_one_that_is_named():
    class SavesLate(Hook):
        def on_exception(self, trainer):
            trainer.save_checkpoint(reason="exception")

    with pytest.raises(RuntimeError) as failed:
        logged(hooks=[Fails(), SavesLate()]).fit(Net(), batches(5))
    assert "Saved: run/checkpoints/step-3, at step 3." in failed.value.__notes__[-1]


def test_nothing_saved_is_said_too_and_no_resume_is_offered():
    with pytest.raises(RuntimeError) as failed:
        quiet(hooks=[Fails()]).fit(Net(), batches(5))
    assert failed.value.__notes__[-1].splitlines()[1:] == [
        "Nothing was saved, so there is nothing to resume from."
    ]


def test_a_checkpoint_that_is_gone_is_not_offered():
    saves = SavesFirstEpoch()
    trainer = quiet(hooks=[saves, Fails(5)], run_dir="run", max_epochs=2)
    trainer.on("step_end")(lambda step: trainer.remove_checkpoint(saves.path) if step == 4 else None)
    with pytest.raises(RuntimeError) as failed:
        trainer.fit(Net(), batches(3))
    assert "Nothing was saved" in failed.value.__notes__[-1]


def test_mistakes_before_the_run_get_no_last_words():
    with pytest.raises(Exception, match="no optimizer") as failed:

        class Forgets(Net):
            def prepare_data(self):
                raise RuntimeError("no optimizer")

        quiet().fit(Forgets(), batches(1))
    assert end_summary(failed.value) is None


def test_a_validation_that_fails_has_none_either():
    class Breaks(Net):
        def validation_step(self, batch, batch_idx):
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data") as failed:
        quiet().validate(Breaks(), batches(1))
    assert end_summary(failed.value) is None


def test_a_very_long_message_is_cut():
    class Long(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("x" * 5000 + "\n" + str(torch.zeros(3)))

    with pytest.raises(ValueError) as failed:
        quiet().fit(Long(), batches(1))
    assert len(failed.value.__notes__[-1]) < 700 and "…" in failed.value.__notes__[-1]


def test_the_last_record_says_how_the_run_ended():
    trainer = quiet(run_dir="run", logger=True)
    trainer.on("step_end")(lambda step, state: state.request_stop("enough") if step == 2 else None)
    trainer.fit(Net(), batches(4))
    last = json.loads(Path("run/log.jsonl").read_text().splitlines()[-1])
    assert (last["type"], last["status"], last["reason"], last["step"]) == ("end", "stopped", "enough", 2)


def test_an_error_that_cannot_even_be_told_is_still_the_one_that_is_raised():
    class Mute(Exception):
        def __str__(self):
            raise KeyError("no words")

    def fail():
        raise Mute

    trainer = logged()
    trainer.on("step_end")(fail)
    with pytest.raises(Mute) as caught:
        trainer.fit(Net(), batches(1))
    assert "Failed: Mute: (its message cannot be read: KeyError), in" in caught.value.__notes__[-1]
    assert records("failure")[0]["exception"] == "Mute"


# ---- a resume that is refused ------------------------------------------------------------------------------------


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)


def test_a_resume_that_is_refused_does_not_offer_the_very_same_once_more():
    saves = SavesFirstEpoch()
    quiet(hooks=[saves], run_dir="run").fit(Net(), batches(3))
    with pytest.raises(CheckpointError) as failed:
        quiet(run_dir="run", max_epochs=2).fit(Wider(), batches(3), resume=saves.path)
    words = failed.value.__notes__[-1]
    assert "To resume" not in words and words.endswith(f"Nothing was trained, and {saves.path} is unchanged.")


def test_a_run_that_trained_nothing_shows_no_cost_of_its_hooks(capfd):
    logged(hooks=[SavesFirstEpoch()]).fit(Net(), batches(3))
    with pytest.raises(CheckpointError):
        logged(max_epochs=2, hooks=[ModelCheckpoint()], enable_progress_bar=True).fit(
            Wider(), batches(3), resume="auto"
        )
    assert "Hooks took" not in capfd.readouterr().err


def test_the_first_sentence_of_an_error_does_not_end_in_its_example():
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("pass step=lambda model, batch: ... Or a loss.\nOr neither.")

    with pytest.raises(ValueError) as failed:
        quiet().fit(Breaks(), batches(3))
    assert "batch: ... Or a loss, at epoch 0" in failed.value.__notes__[-1]


def test_a_refused_call_is_said_once_and_without_a_position():
    trainer = logged()
    with pytest.raises(OptionError) as refused:
        trainer.fit(torch.nn.Linear(4, 2), batches(3))
    assert getattr(refused.value, "__notes__", []) == [] and end_summary(refused.value) is None
    trainer.fit(Net(), batches(1))
    with pytest.raises(OptionError) as refused:
        trainer.fit(torch.nn.Linear(4, 2), batches(3))
    assert refused.value.__notes__ == ["run still belongs to the earlier run (completed at step 1)."]


def test_a_completed_run_that_cannot_be_taken_up_again_is_still_completed():
    logged(hooks=[SavesFirstEpoch()]).fit(Net(), batches(3))
    with pytest.raises(CheckpointError):
        logged(max_epochs=2).fit(Wider(), batches(3), resume="auto")
    assert not records("failure")
    end = records("end")[-1]
    assert (
        (end["status"], end["step"])
        == ("completed", 3)
        == (json.loads(Path("run/run.json").read_text())["status"], 3)
    )


def test_a_run_that_is_taken_up_and_then_fails_has_failed():
    saves = SavesFirstEpoch()
    logged(hooks=[saves]).fit(Net(), batches(3))
    with pytest.raises(RuntimeError) as failed:
        logged(max_epochs=2, hooks=[Fails(4)]).fit(Net(), batches(3), resume="auto")
    assert records("end")[-1]["status"] == "error"
    assert "To resume" in failed.value.__notes__[-1]


# ---- an interrupt -------------------------------------------------------------------------------------------------


class Interrupted(Hook):
    """Ctrl-C, once or twice."""

    def __init__(self, times=1):
        self.times = times

    def on_step_end(self, step):
        if step == 7:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interruptible():
    """Ctrl-C as Python has it by itself: the tests may run where it is switched off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_says_where_the_run_was_and_how_to_resume_and_a_notebook_shows_only_that():
    with pytest.raises(KeyboardInterrupt) as ended:
        quiet(run_dir="run", max_epochs=3, hooks=[Interrupted()]).fit(Net(), batches(5))
    lines = [
        "Interrupted at step 7, 1 epoch and 2 batches.",
        "Saved: run/checkpoints/step-7, at step 7.",
        "To resume: trainer.fit(module, ..., resume='run/checkpoints/step-7')",
    ]
    assert type(ended.value) is KeyboardInterrupt and ended.value.__notes__[-1].splitlines() == lines
    assert ended.traceback[-1].name == "fit"
    assert ended.value._render_traceback_() == lines  # what IPython shows in place of the traceback


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_shows_where_it_came():
    with pytest.raises(KeyboardInterrupt) as ended:
        quiet(run_dir="run", max_epochs=3, hooks=[Interrupted(times=2)]).fit(Net(), batches(5))
    assert ended.value.__notes__[-1] == (
        "Interrupted at step 7, 1 epoch and 2 batches.\n"
        "Nothing was saved, so there is nothing to resume from."
    )
    assert not hasattr(ended.value, "_render_traceback_")


def test_an_interrupt_that_a_hook_raises_keeps_its_traceback():
    trainer = quiet(run_dir="run")
    trainer.on("step_end")(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as ended:
        trainer.fit(Net(), batches(5))
    assert (
        not hasattr(ended.value, "_render_traceback_")
        and "Interrupted at step 1" in ended.value.__notes__[-1]
    )


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_before_the_first_batch_is_not_called_nothing_to_train(caplog):
    trainer = quiet(run_dir="run")
    trainer.on("fit_start")(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as ended:
        trainer.fit(Net(), batches(5))
    assert "Nothing to train" not in caplog.text and ended.value._render_traceback_() == [
        "Interrupted at step 0, 0 epochs. Nothing was trained, so nothing was saved."
    ]


def test_a_run_that_early_stopping_ends_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    class Flat(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.ones(())

    trainer = quiet(max_epochs=9, enable_progress_bar=True, hooks=[EarlyStopping(patience=2)])
    trainer.fit(Flat(), batches(), batches(1))
    assert (
        "Stopped in epoch 2, at step 12: EarlyStopping: val/loss did not improve in 2 checks; the best was 1 "
        "in epoch 0\n"
    ) in capsys.readouterr().err
    quiet(max_epochs=1, enable_progress_bar=True).fit(Net(), batches())
    assert "Stopped" not in capsys.readouterr().err


def test_a_validation_says_once_that_it_uses_the_loss_of_the_last_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def squares(outputs, targets):
        return ((outputs - targets) ** 2).mean()

    net = torch.nn.Linear(4, 2)
    trainer = quiet(enable_progress_bar=True)
    trainer.fit(net, batches(1), loss=squares, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    trainer.predict(net, batches(1))
    assert "squares" not in capsys.readouterr().err
    trainer.validate(net, batches(1))
    said = "validate() uses loss=squares, as the last run of this module did."
    assert said in capsys.readouterr().err.splitlines()
    trainer.validate(net, batches(1))
    trainer.test(net, batches(1))
    trainer.validate(net, batches(1), loss=torch.nn.functional.mse_loss)
    assert "uses" not in capsys.readouterr().err
    trainer.test(net, batches(1))
    assert "test() uses loss=mse_loss," in capsys.readouterr().err


def test_a_refused_fit_is_not_the_last_run_of_a_module() -> None:
    net = torch.nn.Linear(4, 2)
    sgd, asked = torch.optim.SGD(net.parameters(), lr=0.1), []

    def step(model, batch):
        asked.append(batch)
        return model(batch[0]).sum()

    trainer = quiet()
    trainer.fit(net, batches(1), loss=torch.nn.functional.mse_loss, optimizer=sgd)
    other = torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1)
    with pytest.raises(HooklineError, match="holds no parameter"):
        trainer.fit(net, batches(1), step=step, optimizer=other)
    assert trainer.validate(net, batches(1))["val/loss"] > 0 and asked == []


def test_without_a_progress_bar_the_notice_about_a_reused_step_is_in_the_log(caplog) -> None:
    net = torch.nn.Linear(4, 2)
    trainer = quiet()
    trainer.fit(
        net,
        batches(1),
        step=lambda model, batch: model(batch[0]).sum(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
    )
    with caplog.at_level("INFO", "hookline"):
        trainer.validate(net, batches(1))
    assert caplog.messages == ["validate() uses step=<lambda>, as the last run of this module did."]


class Corrupt(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("corrupt image file no. 77")
        return torch.ones(4), torch.ones(2)


def test_an_error_in_a_worker_of_the_loader_is_told_by_its_own_words_everywhere(capsys):
    loader = torch.utils.data.DataLoader(Corrupt(), batch_size=2, num_workers=2)
    with pytest.raises(ValueError, match="Original Traceback") as caught:
        logged().fit(Net(), loader)
    text = "corrupt image file no. 77 (in a worker of the loader)"
    assert f"Failed: ValueError: {text}, at epoch 0" in end_summary(caught.value).note()
    assert json.loads(Path("run/run.json").read_text())["error"] == {"type": "ValueError", "message": text}
    assert (records("failure")[0]["exception"], records("failure")[0]["message"]) == ("ValueError", text)
    main(["summary", "run"])
    said = capsys.readouterr().out
    assert said.count(text) == 1 and "Traceback" not in said
