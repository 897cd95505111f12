"""Hookline calls what Lightning calls, in Lightning's order, but for a list of differences that are meant.

`recorded/lightning-2.6.6.json` holds what spies heard in 29 scenarios run by Lightning 2.6.6. Each scenario runs here
with spies of our own; `RULES` takes away the differences one by one, each with what the lifecycle says about it, and then
the two sequences must be the same. A rule takes out or moves whole groups of calls, only in the place where they belong
and each time they belong there, so that an event missing, too many, in the wrong place or with the wrong audience is found.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from spies import Scene, method_of, stepped_by_step, stepped_on_metric

from hookline.engine.events import EVENT_ROWS
from hookline.engine.recorder import Call

RECORDED: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "recorded" / "lightning-2.6.6.json").read_text()
)


# ---- the scenarios -----------------------------------------------------------------------------------------------


def fit(*hooks: str, does: dict[str, Any] | None = None, **settings: Any) -> list[Call]:
    return Scene(hooks or ("plain", "monitor"), does, **settings).run()


def failing(who: str, error: type[BaseException], when: Callable[[Any], bool]) -> list[Call]:
    """A run that dies in a step of the module."""

    def fail(state: Any) -> None:
        if when(state):
            raise error("on purpose")

    scene = Scene(does={f"module {who}": fail})
    with pytest.raises(error, match="on purpose"):
        scene.run()
    return scene.recorder.calls


def resumed(save_at: str, epochs: int) -> list[Call]:
    """A run that saved at this event of its first batch or epoch, continued by a second one."""

    def save_first(state: Any) -> None:
        if state.batches_seen == 1 or save_at == "on_train_epoch_end":
            state.trainer.save_checkpoint("first")

    Scene(does={f"plain {save_at}": save_first}).run()
    return Scene(max_epochs=epochs).run(resume="first")


def stopped_in_the_middle() -> list[Call]:
    def stop(state: Any) -> None:
        state.trainer.should_stop = state.batch_idx == 1

    return fit(does={"plain on_train_batch_end": stop}, batches_of={"train": [5]})


def saved_outside() -> list[Call]:
    scene = Scene()
    scene.run()
    scene.recorder.calls.clear()
    with scene.recorder:
        scene.trainer.save_checkpoint("outside")
    return scene.recorder.calls


def with_passed_loaders() -> list[Call]:
    scene = Scene(datamodule=False, max_epochs=2)
    return scene.run("fit", scene.loader("train"), scene.loader("val"))


def save(state: Any) -> None:
    state.trainer.save_checkpoint("asked")


SCENARIOS: dict[str, Callable[[], list[Call]]] = {
    "fit": lambda: fit(max_epochs=2),
    "fit_accumulate2": lambda: fit(max_epochs=2, accumulate_grad_batches=2),
    "fit_accumulate2_3batches": lambda: fit(
        max_epochs=2, accumulate_grad_batches=2, batches_of={"train": [3]}
    ),
    "fit_val_check_interval_half_epoch": lambda: fit(max_epochs=2, val_check_interval=0.5),
    "fit_no_sanity": lambda: fit(max_epochs=2, num_sanity_val_steps=0),
    "fit_limit_val_batches_0": lambda: fit(max_epochs=2, limit_val_batches=0),
    "fit_max_steps_3": lambda: fit(max_epochs=2, max_steps=3),
    "fit_no_datamodule": lambda: fit(max_epochs=2, datamodule=False),
    "fit_dataloaders_passed": with_passed_loaders,
    "fit_gradient_clip": lambda: fit(gradient_clip_val=0.5),
    "fit_manual_optimization": lambda: fit(automatic=False),
    "fit_scheduler_interval_step": lambda: fit(optimizers=stepped_by_step),
    "fit_scheduler_plateau_epoch": lambda: fit(optimizers=stepped_on_metric),
    "fit_two_val_dataloaders": lambda: fit(batches_of={"val": [1, 1]}),
    "fit_four_callbacks": lambda: fit("early", "monitor1", "plain1", "monitor2", "plain2"),
    "fit_configure_callbacks": lambda: fit("monitor", from_module=["from_model"]),
    "fit_should_stop_mid_epoch": stopped_in_the_middle,
    "fit_save_in_monitor_on_train_epoch_end": lambda: fit(does={"monitor on_train_epoch_end": save}),
    "fit_resume_from_epoch_end": lambda: resumed("on_train_epoch_end", epochs=2),
    "fit_resume_from_mid_epoch": lambda: resumed("on_train_batch_end", epochs=1),
    "validate": lambda: Scene().run("validate"),
    "test": lambda: Scene().run("test"),
    "predict": lambda: Scene().run("predict"),
    "validate_two_dataloaders": lambda: Scene(batches_of={"val": [1, 1]}).run("validate"),
    "predict_two_dataloaders": lambda: Scene(batches_of={"predict": [1, 1]}).run("predict"),
    "exception_in_training_step": lambda: failing("training_step", RuntimeError, lambda s: s.batch_idx == 1),
    "keyboard_interrupt_in_training_step": lambda: failing(
        "training_step", KeyboardInterrupt, lambda s: s.batch_idx == 1
    ),
    "exception_in_validation_step_of_fit": lambda: failing(
        "validation_step", RuntimeError, lambda s: not s.sanity_checking
    ),
    "trainer_save_checkpoint_outside_loop": saved_outside,
}
FAILING = tuple(name for name in RECORDED if "exception" in name or "interrupt" in name)
RESUMED = tuple(name for name in RECORDED if "resume" in name)


# ---- the rules: how two sequences that mean the same may differ --------------------------------------------------

SPELLINGS = {**{row.name: method_of(row) for row in EVENT_ROWS}, "configure_hooks": "configure_callbacks"}
WHO = {"M": "module", "D": "datamodule", "S": "strategy"}


def in_lightnings_words(call: Call) -> str:
    who = f"callback:{call.name}" if call.receiver == "H" else WHO[call.receiver]
    return f"{who} {SPELLINGS.get(call.event, call.event)}"


def group(event: str, receivers: str, hooks: list[str]) -> list[str]:
    """The calls of one event, for these receivers."""
    whos = {**{each: [name] for each, name in WHO.items()}, "H": [f"callback:{name}" for name in hooks]}
    return [f"{who} {event}" for each in receivers for who in whos[each]]


Edit = Callable[[list[str], list[str]], list[str]]
"""From a sequence and the names of the hooks, in their order, to the sequence without a difference."""


def extra(event: str, receivers: str, *, after: str = "", before: str = "", if_updated: bool = False) -> Edit:
    """Take out the calls of an event that Hookline has right `after` (or `before`) each of another call.

    They must be there each time, or, `if_updated`, each time the batch had an update; otherwise a complaint is put in.
    """

    def take_out(entries: list[str], hooks: list[str]) -> list[str]:
        calls, missing = group(event, receivers, hooks), f"(here should be {event}, heard by {receivers})"
        follows, precedes = (
            each.replace("LAST HOOK", f"callback:{hooks[-1]}").split(" or ") for each in (after, before)
        )
        kept: list[str] = []
        rest = entries
        updated = False
        while rest:
            entry, *rest = rest
            if entry in precedes:
                kept = kept[: -len(calls)] if kept[-len(calls) :] == calls else [*kept, missing]
            kept.append(entry)
            updated = entry == "module on_after_optimizer_step" or (
                updated and entry != "strategy on_train_batch_start"
            )
            if entry in follows and (updated or not if_updated):
                if rest[: len(calls)] == calls:
                    rest = rest[len(calls) :]
                else:
                    kept.append(missing)
        return kept

    return take_out


def validation_clears_no_gradients(entries: list[str], hooks: list[str]) -> list[str]:
    """Take out the call that Lightning makes right before a validation in the course of training."""
    following = [*entries[1:], ""]
    zero_grad, model_eval = "module on_validation_model_zero_grad", "module on_validation_model_eval"
    return [
        entry
        for entry, then in zip(entries, following, strict=True)
        if (entry, then) != (zero_grad, model_eval)
    ]


def no_state_before_validation(entries: list[str], hooks: list[str]) -> list[str]:
    """Take out the calls of state_dict that Hookline makes right before a validation in the course of training."""
    kept: list[str] = []
    for entry in entries:
        if entry == "module on_validation_model_eval":
            while kept[-1].startswith("callback:") and kept[-1].endswith(" state_dict"):
                kept.pop()
        kept.append(entry)
    return kept


def fetching(entries: list[str], hooks: list[str]) -> list[str]:
    """Take out the events around each fetch; a last one finds the loader exhausted. A batch without them is a complaint."""
    asked, given = (group(event, "HM", hooks) for event in ("on_before_batch_fetch", "on_after_batch_fetch"))
    kept: list[str] = []
    rest, is_fetched = entries, False
    while rest:
        if rest[: len(asked)] == asked:
            rest, is_fetched = rest[len(asked) :], False
            if rest[: len(given)] == given:
                rest, is_fetched = rest[len(given) :], True
            continue
        entry, *rest = rest
        is_moved = " on_before_batch_transfer" in entry
        if is_moved and " on_before_batch_transfer" not in kept[-1] and not is_fetched:
            kept.append("(here should be the events around a fetch)")
        kept.append(entry)
    return kept


def loader_before_sanity_check(entries: list[str], hooks: list[str]) -> list[str]:
    """Move `val_dataloader` from right before on_sanity_check_start to right after it."""
    start = group("on_sanity_check_start", "H", hooks)
    for position, entry in enumerate(entries):
        if entry.endswith(" val_dataloader") and entries[position + 1 : position + 1 + len(start)] == start:
            return [*entries[:position], *start, entry, *entries[position + 1 + len(start) :]]
    return entries


def update_after_backward(entries: list[str], hooks: list[str]) -> list[str]:
    """Move Lightning's optimizer_step, which encloses the step, to where it updates; a step that failed never got there."""
    moved: list[str] = []
    begun = False
    for entry in entries:
        if entry == "module optimizer_step":
            begun = True
        elif entry != "strategy optimizer_step" or not begun:
            moved.append(entry)
        if entry == "module configure_gradient_clipping" and begun:
            begun = False
            moved += ["strategy optimizer_step", "module optimizer_step"]
    return moved


def manual_update_after_its_announcement(entries: list[str], hooks: list[str]) -> list[str]:
    """Move the strategy's optimizer_step from right before on_before_optimizer_step to right after it."""
    announced = group("on_before_optimizer_step", "HM", hooks)
    moved = list(entries)
    for position, entry in enumerate(entries):
        if (
            entry == "strategy optimizer_step"
            and entries[position + 1 : position + 1 + len(announced)] == announced
        ):
            moved[position : position + 1 + len(announced)] = [*announced, entry]
    return moved


def backward_after_its_announcement(entries: list[str], hooks: list[str]) -> list[str]:
    """Move the strategy's backward from before on_before_backward to right before the module's."""
    moved: list[str] = []
    for entry in entries:
        if entry == "module backward" and "strategy backward" in moved[-len(hooks) - 2 :]:
            position = len(moved) - 1 - moved[::-1].index("strategy backward")
            moved.append(moved.pop(position))
        moved.append(entry)
    return moved


def early_stopping_is_a_monitor(entries: list[str], hooks: list[str]) -> list[str]:
    """Move `early` from among the monitors to the front, at every event where all hooks are called in a row."""
    moved = list(entries)
    for position in range(len(entries) - len(hooks) + 1):
        calls = group(entries[position].split()[1], "H", hooks)
        if moved[position : position + len(hooks)] == calls:
            early = [each for each in calls if each.startswith("callback:early ")]
            moved[position : position + len(hooks)] = early + [each for each in calls if each not in early]
    return moved


@dataclass(frozen=True)
class Rule:
    """One difference: what it is called, what the lifecycle says, and how it is taken away."""

    name: str
    because: str
    edit: Edit
    of: str = "hookline"
    """Whose sequence is edited."""
    only: tuple[str, ...] = ()
    """The scenarios it is for; by default all, and at least one of them must need it."""


EVALUATION = (
    "validation_epoch_start",
    "validation_batch_start",
    "validation_batch_end",
    "validation_epoch_end",
    "test_epoch_start",
    "test_batch_start",
    "test_batch_end",
    "test_epoch_end",
)

MANUAL = ("fit_manual_optimization",)

RULES = (
    # ---- what Hookline says besides ---------------------------------------------------------------------------
    Rule(
        "events around fetching a batch",
        "Hooks and module hear when the loop fetches a batch and when it has it.",
        fetching,
    ),
    Rule(
        "on_train_metrics after an update",
        "Whenever training metrics are about to be logged, hooks and module may edit "
        "them; those of an update go out before its on_step_end.",
        extra("on_train_metrics", "HM", after="module on_train_batch_end", if_updated=True),
    ),
    Rule(
        "on_train_metrics after an epoch",
        "The same for an epoch's metrics, once on_train_epoch_end has been heard.",
        extra("on_train_metrics", "HM", after="LAST HOOK on_train_epoch_end"),
    ),
    Rule(
        "on_step_end",
        "Once per update, after its on_train_batch_end; not after a micro-batch without one.",
        extra("on_step_end", "HM", after="module on_train_batch_end", if_updated=True),
    ),
    Rule(
        "on_after_optimizer_step",
        "Hooks and module hear of an update as soon as the weights are new.",
        extra("on_after_optimizer_step", "HM", after="module optimizer_step"),
    ),
    Rule(
        "on_after_optimizer_step of a manual update",
        "The same if the training step calls the optimizer itself.",
        extra("on_after_optimizer_step", "HM", after="strategy optimizer_step"),
        only=MANUAL,
    ),
    Rule(
        "on_before_zero_grad of a manual update",
        "Before an optimizer's gradients are cleared, they can be looked at.",
        extra("on_before_zero_grad", "HM", after="module training_step"),
        only=MANUAL,
    ),
    Rule(
        "on_gradient_clip",
        "Clipping, if it is on, is told between the clipping and the update.",
        extra("on_gradient_clip", "HM", after="module configure_gradient_clipping"),
        only=("fit_gradient_clip",),
    ),
    Rule(
        "state_dict before a validation",
        "A validation that a signal cuts short leaves no trace in the checkpoint, so the "
        "state of hooks that hear it begin is kept until it is over.",
        no_state_before_validation,
    ),
    Rule(
        "on_checkpoint_save",
        "When a checkpoint is complete and durable, hooks and module are told where it is.",
        extra("on_checkpoint_save", "HM", after="module on_save_checkpoint"),
    ),
    Rule(
        "on_checkpoint_load",
        "When all of a checkpoint is in place, optimizers included, hooks and module are told.",
        extra("on_checkpoint_load", "HM", after="module configure_optimizers"),
        only=RESUMED,
    ),
    Rule(
        "modes come back after predict",
        "Every submodule's train or eval flag is restored after each kind of evaluation.",
        extra("on_predict_model_train", "M", after="strategy on_predict_end"),
    ),
    # ---- who hears it besides ---------------------------------------------------------------------------------
    *[
        Rule(
            f"hooks hear {event}",
            "Hooks may listen before and after the transfer that data module or module does.",
            extra(event, "H", before=f"datamodule {event} or module {event}"),
        )
        for event in ("on_before_batch_transfer", "on_after_batch_transfer")
    ],
    *[
        Rule(
            f"module and strategy hear {event}",
            "Both ends of the sanity check reach hooks, module and strategy.",
            extra(event, "MS", after=f"LAST HOOK {event}"),
        )
        for event in ("on_sanity_check_start", "on_sanity_check_end")
    ],
    *[
        Rule(
            f"strategy hears on_{event}",
            "All six events of an evaluation reach the strategy too.",
            extra(f"on_{event}", "S", after=f"module on_{event}"),
        )
        for event in EVALUATION
    ],
    Rule(
        "module hears on_exception",
        "A failure is told to hooks, module, data module and strategy.",
        extra("on_exception", "M", after="LAST HOOK on_exception"),
        only=FAILING,
    ),
    Rule(
        "teardown after a failure",
        "Teardown comes always, once, for everyone whose set-up began.",
        extra("teardown", "DHM", after="strategy teardown"),
        only=FAILING,
    ),
    # ---- where it stands --------------------------------------------------------------------------------------
    Rule(
        "val_dataloader before the sanity check",
        "The sanity check is told only if there is something to check, so the loader is asked for first.",
        loader_before_sanity_check,
    ),
    Rule(
        "early stopping is a monitor everywhere",
        "Whatever acts on a metric runs after the user's other hooks, at every "
        "event; Lightning does so for checkpointing only.",
        early_stopping_is_a_monitor,
        only=("fit_four_callbacks",),
    ),
    Rule(
        "on_train_epoch_start of a resumed epoch",
        "In the middle of an epoch too, a resume fires on_train_epoch_start, so "
        "that starts and ends pair up in every process.",
        extra("on_train_epoch_start", "HM", after="strategy on_train_start"),
        only=("fit_resume_from_mid_epoch",),
    ),
    Rule(
        "backward after its announcement",
        "on_before_backward comes before the backward of strategy and module both.",
        backward_after_its_announcement,
        of="lightning",
    ),
    Rule(
        "update after backward",
        "The order is literal: optimizer_step, through the strategy to the module, follows "
        "backward and clipping; the loss is not computed inside it.",
        update_after_backward,
        of="lightning",
    ),
    Rule(
        "manual update after its announcement",
        "on_before_optimizer_step comes before the strategy's part in the update.",
        manual_update_after_its_announcement,
        of="lightning",
        only=MANUAL,
    ),
    # ---- what Hookline does not do ----------------------------------------------------------------------------
    Rule(
        "validation leaves gradients alone",
        "The gradients of an open accumulation window survive a validation.",
        validation_clears_no_gradients,
        of="lightning",
    ),
)


# ---- the comparison ----------------------------------------------------------------------------------------------


@functools.cache
def compare(name: str) -> tuple[list[str], list[str], frozenset[str]]:
    """Hookline's and Lightning's sequence after the rules, and the rules that had an effect."""
    calls = SCENARIOS[name]()
    sides = {"hookline": [in_lightnings_words(call) for call in calls], "lightning": list(RECORDED[name])}
    hooks = list(dict.fromkeys(call.name for call in calls if call.receiver == "H"))
    used = set()
    for rule in RULES:
        if rule.only and name not in rule.only:
            continue
        before = sides[rule.of]
        sides[rule.of] = rule.edit(before, hooks)
        if sides[rule.of] != before:
            used.add(rule.name)
    return sides["hookline"], sides["lightning"], frozenset(used)


@pytest.mark.parametrize("name", RECORDED)
def test_same_sequence_as_lightning_but_for_the_rules(name: str) -> None:
    ours, theirs, _ = compare(name)
    assert ours == theirs, "\n" + "\n".join(
        difflib.unified_diff(theirs, ours, "Lightning", "Hookline", lineterm="", n=2)
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_is_needed_where_it_applies(rule: Rule) -> None:
    if rule.only:
        assert [name for name in rule.only if rule.name not in compare(name)[2]] == []
    else:
        assert any(rule.name in compare(name)[2] for name in RECORDED)


def test_every_recorded_scenario_is_run() -> None:
    assert list(SCENARIOS) == list(RECORDED)
