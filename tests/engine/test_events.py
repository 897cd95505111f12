"""The table is whole: rows name facts that exist, every emit has a row, every row is emitted, views are up to date."""

from __future__ import annotations

import ast
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import preloaded
import pytest
from tiny import Net, batches, quiet

from hookline import (
    EVENTS,
    SKIP_STEP,
    DataModule,
    Hook,
    HookError,
    HooklineError,
    Preempted,
    Recorder,
    declare_event,
)
from hookline.engine.events import EVENT_ROWS
from hookline.engine.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
EMITTERS = [ROOT / "src" / "hookline" / name for name in ("training", "run")]


# ---- rows and emits ----------------------------------------------------------------------------------------------


def emitted() -> set[str]:
    """Names of plan slots that the loops fetch, unless only to compare them."""
    names: set[str] = set()
    for path in (path for folder in EMITTERS for path in sorted(folder.rglob("*.py"))):
        tree = ast.parse(path.read_text())
        compared = {
            id(side)
            for node in ast.walk(tree)
            if isinstance(node, ast.Compare)
            for side in (node.left, *node.comparators)
        }
        names |= {node.attr for node in slots(tree) if id(node) not in compared}
        names |= set(getter_names(tree))
    members = set(vars(quiet().plan)) - {event.name for event in EVENT_ROWS}  # what a plan has besides slots
    return names - set(vars(Plan)) - members


def slots(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if getattr(owner, "id", getattr(owner, "attr", None)) == "plan":
                yield node


def getter_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "attrgetter":
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def test_every_emit_in_the_loops_has_a_row():
    assert emitted() - {event.name for event in EVENT_ROWS} == set()


def test_every_row_is_emitted_by_a_loop():
    assert {event.name for event in EVENT_ROWS} - emitted() == set()


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_every_event_for_hooks_is_heard_in_a_real_run(tmp_path):
    class SkipFirst(Hook):
        def on_before_optimizer_step(self, batches_seen):
            return SKIP_STEP if batches_seen == 0 else None

    class Failing(Hook):
        def on_train_start(self):
            raise RuntimeError("on purpose")

    names = [event.name for event in EVENT_ROWS if "H" in event.receivers]
    trainer = quiet(
        hooks=[SkipFirst()],
        gradient_clip_val=1.0,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        on_save_error="warn",
        run_dir=tmp_path / "run",
    )
    trainer.on(*names, name="ear")(lambda: None)
    trainer.on("train_end")(lambda: trainer.save_checkpoint(tmp_path / "saved"))
    (tmp_path / "file").touch()
    trainer.on("train_start")(lambda: trainer.save_checkpoint(tmp_path / "file" / "cannot be made"))
    module = Net()
    with Recorder(trainer) as recorder:
        trainer.fit(module, batches(3), batches(1))
        trainer.fit(module, batches(3), batches(1), resume=tmp_path / "saved")
        trainer.validate(module, batches(1))
        trainer.test(module, batches(1))
        trainer.predict(module, batches(1))
        with trainer.add_hook(Failing()), pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(module, batches(1))
        with trainer.on("validation_batch_end")(terminate), pytest.raises(Preempted):
            trainer.fit(module, batches(1), batches(1))
    assert {call.event for call in recorder.calls if call.name == "ear"} == set(names)


def test_every_event_of_the_module_and_data_module_that_is_no_action_is_heard(tmp_path):
    heard = set()

    def listening(receiver, base):
        def method(name):
            return lambda self: heard.add((receiver, name))

        rows = [event for event in EVENT_ROWS if receiver in event.receivers and not event.action]
        return type("Listening", (base,), {event.name: method(event.name) for event in rows}), rows

    listening_net, of_module = listening("M", Net)
    listening_data, of_data = listening("D", DataModule)
    data = type(
        "Data",
        (listening_data,),
        {f"{kind}_dataloader": lambda self: batches(2) for kind in ("train", "val", "test", "predict")},
    )()
    trainer = quiet(
        gradient_clip_val=1.0,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        on_save_error="warn",
        run_dir=tmp_path / "run",
    )
    trainer.on("train_end")(lambda: trainer.save_checkpoint(tmp_path / "saved"))
    (tmp_path / "file").touch()
    trainer.on("train_start")(lambda: trainer.save_checkpoint(tmp_path / "file" / "cannot be made"))
    module = listening_net()
    with trainer.on("before_optimizer_step", once=True)(lambda: SKIP_STEP):
        trainer.fit(module, datamodule=data)
    trainer.fit(module, batches(2), batches(1), resume=tmp_path / "saved")
    for verb in (trainer.validate, trainer.test, trainer.predict):
        verb(module, datamodule=data)
    with trainer.on("train_start")(lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        trainer.fit(module, datamodule=data)
    with trainer.on("validation_batch_end")(terminate), pytest.raises(Preempted):
        trainer.fit(module, datamodule=data)
    # a data module takes the place of the module where the row says "either"; the resumed run had none
    assert heard == {("M", event.name) for event in of_module} | {("D", event.name) for event in of_data}


def test_what_is_generated_from_the_table_is_up_to_date():
    result = preloaded.run(
        [sys.executable, str(ROOT / "tools" / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


# ---- events of one's own -----------------------------------------------------------------------------------------


@pytest.fixture
def declare():
    """`declare_event`, taken back afterwards."""
    before = {event.name for event in EVENTS}
    yield declare_event
    for name in {event.name for event in EVENTS} - before:
        EVENTS.forget(name)


def test_a_declared_event_reaches_hooks_and_module_with_its_facts(declare):
    declare("on_reward", ("reward", "source"), "A reward came in.")
    got = []

    class Actor(Net):
        def training_step(self, batch, batch_idx):
            self.trainer.emit("on_reward", reward=batch_idx * 10, source="game")
            return super().training_step(batch, batch_idx)

        def on_reward(self, reward):
            got.append(("module", reward))

    class Listener(Hook):
        def on_reward(self, source, reward, step):
            got.append((source, reward, step))

    quiet(hooks=[Listener()]).fit(Actor(), batches(2))
    assert got == [("game", 0, 0), ("module", 0), ("game", 10, 1), ("module", 10)]


def test_filters_order_and_error_policies_hold_for_declared_events(declare):
    declare("on_tick")
    got = []

    class Fails(Hook):
        on_error = "disable"

        def on_tick(self):
            got.append("fails")
            raise RuntimeError("on purpose")

    class Late(Hook):
        order = 5

        def on_tick(self):
            got.append("late")

    trainer = quiet(hooks=[Late(), Fails()])
    trainer.on("tick", every=2)(lambda: got.append("second"))
    for _ in range(2):
        trainer.emit("tick")
    assert got == ["fails", "late", "second", "late"]


def test_a_declared_event_can_let_its_listeners_replace_a_fact(declare):
    declare("on_prompt", ("text",), replaces="text")
    trainer = quiet()
    trainer.on("prompt")(lambda text: text + "!")
    trainer.on("prompt")(lambda text: None)
    trainer.on("prompt")(lambda text: text.upper())
    assert trainer.emit("on_prompt", text="hi") == "HI!"


def test_a_trainer_made_before_the_declaration_can_emit_the_event(declare):
    trainer, got = quiet(), []
    declare("on_late_idea")
    trainer.emit("on_late_idea")
    trainer.on("late_idea")(lambda: got.append(1))
    trainer.emit("on_late_idea")
    assert got == [1]


def test_declared_events_nest(declare):
    declare("on_outer", ("depth",))
    declare("on_inner", ("depth",))
    trainer, got = quiet(), []
    trainer.on("outer")(lambda depth: trainer.emit("on_inner", depth=depth + 1))
    trainer.on("outer")(lambda depth: got.append(depth))
    trainer.on("inner")(lambda depth: got.append(depth))
    trainer.emit("on_outer", depth=1)
    assert got == [2, 1]


def test_emitting_with_the_wrong_facts_is_an_error_that_lists_them(declare):
    declare("on_reward", ("reward",))
    with pytest.raises(
        HooklineError, match="on_reward has the facts reward; got rewards.*Did you mean 'reward'"
    ):
        quiet().emit("on_reward", rewards=1)
    with pytest.raises(HooklineError, match="got none"):
        quiet().emit("on_reward")
    with pytest.raises(HookError, match=r"on_prize: facts='reward' is a str.*facts=\('reward',\)"):
        declare("on_prize", "reward")


def test_the_loops_own_events_cannot_be_emitted_by_hand():
    with pytest.raises(HooklineError, match="on_train_start is emitted by the loops"):
        quiet().emit("on_train_start")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reward",), "begins with 'on_'"),
        (("on_a b",), "identifier"),
        (("on_train_start",), "already"),
        (("on_batch_end",), "already"),
        (("on_reward", ("epoch",)), "every event has the fact"),
    ],
)
def test_a_declaration_that_would_clash_is_refused(declare, arguments, message):
    with pytest.raises(HookError, match=message):
        declare(*arguments)


def test_a_declaration_can_only_replace_a_fact_of_its_own(declare):
    with pytest.raises(HookError, match="replaces='loss' is not one of its facts"):
        declare("on_reward", ("reward",), replaces="loss")


def test_a_forgotten_event_is_unknown_again(declare):
    declare("on_reward")
    EVENTS.forget("on_reward")
    with pytest.raises(HookError, match="not an event"):
        quiet().on("reward")
    declare("on_reward")


def test_events_of_the_table_cannot_be_forgotten():
    with pytest.raises(HookError, match="cannot be removed"):
        EVENTS.forget("on_train_start")


def test_forgetting_what_was_never_declared_is_an_error_that_says_so():
    with pytest.raises(HookError, match="on_nothing"):
        EVENTS.forget("on_nothing")


def test_a_trainer_continues_after_an_event_it_knew_was_forgotten(declare):
    declare("on_reward")
    trainer = quiet()
    trainer.on("reward")(lambda: None).remove()
    EVENTS.forget("on_reward")
    with Recorder(trainer) as recorder:
        trainer.fit(Net(), batches(1))
    assert "training_step" in recorder.events()
