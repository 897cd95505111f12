"""The hooks of a trainer by name: added, removed, switched on and off, before, during and inside an event."""

from __future__ import annotations

import re
import sys
import textwrap
from code import InteractiveInterpreter
from typing import Any

import preloaded
import pytest
from engine.noted import Note
from tiny import Net, batches, quiet

from hookline import Hook, HookError, every, on

# ---- names -------------------------------------------------------------------------------------------------------


def test_a_second_hook_of_one_class_gets_a_numbered_name():
    trainer = quiet(hooks=[Note([]), Note([]), Note([], "mine"), Note([])])
    assert trainer.hooks.list_hooks() == ["note", "note_2", "mine", "note_3"]


def test_functions_are_numbered_the_same_way():
    trainer = quiet()
    for _ in range(2):

        @trainer.on("train_start")
        def report(): ...

    trainer.on("train_start")(lambda: None)
    assert trainer.hooks.list_hooks() == ["report", "report_2", "function"]


def test_a_numbered_name_never_takes_one_that_is_there():
    trainer = quiet(hooks=[Note([], "note_2"), Note([]), Note([])])
    assert trainer.hooks.list_hooks() == ["note_2", "note", "note_3"]


def test_a_name_the_user_gave_twice_is_refused():
    trainer = quiet(hooks=[Note([], "mine")])
    with pytest.raises(HookError, match=r"A hook named 'mine' exists \(Note\)"):
        trainer.add_hook(Note([], "mine"))
    with pytest.raises(HookError, match="named 'mine' exists"):
        trainer.add_hook(Note([]), name="mine")
    with pytest.raises(HookError, match="named 'mine' exists"):
        trainer.on("train_start", name="mine")(lambda: None)
    assert trainer.hooks.list_hooks() == ["mine"]


def test_a_name_is_free_again_once_its_hook_is_removed():
    trainer = quiet(hooks=[Note([], "mine")])
    trainer.remove_hook("mine")
    assert trainer.add_hook(Note([], "mine")).name == "mine"


def test_a_name_passed_when_adding_wins():
    assert quiet().add_hook(Note([], "its own"), name="given").name == "given"


def test_one_instance_can_be_added_only_once():
    hook = Note([])
    trainer = quiet(hooks=[hook])
    with pytest.raises(HookError, match="already registered"):
        trainer.add_hook(hook, name="again")


def test_an_unknown_name_is_an_error_with_the_closest_and_the_list():
    trainer = quiet(hooks=[Note([], "reporter"), Note([], "saver")])
    for change in (trainer.remove_hook, trainer.enable_hook, trainer.disable_hook):
        with pytest.raises(
            HookError, match=r"no hook named 'reportr'. Did you mean 'reporter'\? Hooks: reporter, saver"
        ):
            change("reportr")


def test_hooks_are_found_by_name_and_by_themselves():
    hook, stranger = Note([], "mine"), Note([])
    hooks = quiet(hooks=[hook]).hooks
    assert "mine" in hooks and hook in hooks
    assert "other" not in hooks and stranger not in hooks
    assert hooks["mine"] is hook
    assert list(hooks) == [hook] and len(hooks) == 1


# ---- before a run ------------------------------------------------------------------------------------------------


def test_a_removed_hook_is_returned_and_hears_nothing():
    got = []
    hook = Note(got)
    trainer = quiet(hooks=[hook])
    assert trainer.remove_hook("note") is hook
    trainer.fit(Net(), batches(1))
    assert got == []
    assert trainer.hooks.list_hooks() == []


def test_a_disabled_hook_hears_nothing_until_it_is_enabled():
    got = []
    trainer = quiet(hooks=[Note(got)])
    trainer.disable_hook("note")
    trainer.disable_hook("note")
    assert trainer.hooks.list_hooks() == []
    trainer.fit(Net(), batches(1))
    assert got == []
    trainer.enable_hook("note")
    trainer.enable_hook("note")
    trainer.fit(Net(), batches(1))
    assert got == [("", "setup"), ("", "start"), ("", 0), ("", "end"), ("", "teardown")]


def test_an_enabled_hook_gets_its_old_place_back():
    got = []
    trainer = quiet()
    for name in "abc":
        trainer.on("train_start", name=name)(lambda name=name: got.append(name))
    trainer.disable_hook("a")
    trainer.enable_hook("a")
    trainer.fit(Net(), batches(1))
    assert got == ["a", "b", "c"]


def test_a_hook_with_a_mistake_is_not_half_registered():
    class Wrong(Hook):
        def on_train_start(self): ...

        def on_train_end(self, nonsense): ...

    trainer = quiet()
    with pytest.raises(HookError):
        trainer.add_hook(Wrong())
    assert len(trainer.hooks) == 0
    trainer.fit(Net(), batches(1))


# ---- handles -----------------------------------------------------------------------------------------------------


def test_a_handle_removes_what_it_was_given_for_and_twice_does_nothing():
    trainer = quiet()
    handle = trainer.add_hook(Note([], "mine"))
    handle.remove()
    handle.remove()
    another = Note([], "mine")
    trainer.add_hook(another)
    handle.remove()
    assert trainer.hooks["mine"] is another


def test_in_a_with_block_a_hook_lives_as_long_as_the_block():
    got = []
    trainer = quiet()
    with (
        trainer.add_hook(Note(got, "guest")) as handle,
        trainer.on("train_end")(lambda: got.append(("function", "end"))),
    ):
        assert (handle.name, handle.hook.got) == ("guest", got)
        trainer.fit(Net(), batches(1))
    assert len(got) == 6
    trainer.fit(Net(), batches(1))
    assert len(got) == 6


def test_a_with_block_that_fails_removes_the_hook_too():
    trainer = quiet()
    with pytest.raises(ZeroDivisionError), trainer.add_hook(Note([])):
        raise ZeroDivisionError
    assert trainer.hooks.list_hooks() == []


# ---- what hooks cost ---------------------------------------------------------------------------------------------


def test_cost_has_calls_and_time_per_hook_and_event_the_most_expensive_first():
    trainer = quiet(hooks=[Note([], "it")])
    trainer.on("train_batch_end", name="slow")(lambda: sum(range(20_000)))
    trainer.fit(Net(), batches(3))
    rows = {(row.hook, row.event): row for row in trainer.hooks.cost()}
    assert rows["it", "on_train_batch_end"].calls == 3
    assert rows["it", "on_train_start"].calls == 1
    assert all(0 <= row.worst <= row.seconds and row.mean == row.seconds / row.calls for row in rows.values())
    seconds = [row.seconds for row in trainer.hooks.cost()]
    assert seconds == sorted(seconds, reverse=True)


def test_a_filtered_call_costs_nothing_and_a_failing_one_counts():
    class Failing(Hook):
        on_error = "warn"

        def on_train_batch_end(self):
            raise ZeroDivisionError

    trainer = quiet(hooks=[Failing()])
    trainer.on("train_batch_end", every=2, name="second")(lambda: None)
    trainer.fit(Net(), batches(4))
    assert {row.hook: row.calls for row in trainer.hooks.cost()} == {"failing": 4, "second": 2}


def test_cost_is_of_the_newest_run():
    trainer = quiet(hooks=[Note([])])
    for _ in range(2):
        trainer.fit(Net(), batches(3))
        assert max(row.calls for row in trainer.hooks.cost()) == 3


def test_accounting_can_be_left_out():
    got = []
    trainer = quiet(hooks=[Note(got)], accounting=False)
    trainer.fit(Net(), batches(2))
    assert len(got) == 6
    assert trainer.hooks.cost() == []


# ---- functions on a trainer --------------------------------------------------------------------------------------


def test_one_function_can_stand_below_several_registrations_and_their_handle_removes_them_all():
    got = []
    trainer = quiet()

    @trainer.on("train_end")
    @trainer.on("train_batch_end", every=2)
    def note(step):
        got.append(step)

    trainer.fit(Net(), batches(4))
    assert got == [2, 4, 4]
    note(7)
    assert got[-1] == 7
    note.remove()
    assert trainer.hooks.list_hooks() == []


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (
            lambda trainer, note: trainer.on("step_end", note),
            r"not note. To register a function: trainer.on\('step_end'\)\(note\)",
        ),
        (
            lambda trainer, note: trainer.on(note),
            r"trainer.on\(\) takes names of events, not note.*@trainer.on\('step_end'\) above it",
        ),
        (
            lambda trainer, note: on(note),
            r"on\(\) takes names of events, not note.*@on\('step_end'\) above it",
        ),
        (lambda trainer, note: on("step_end", 3), r"on\(\) takes names of events, not 3"),
        (
            lambda trainer, note: every(2)(trainer.on("step_end")(note)),
            "put the decorator below @trainer.on, or pass it there",
        ),
        (
            lambda trainer, note: on("step_end")(trainer.on("step_end")(note)),
            "put the decorator below @trainer.on",
        ),
    ],
    ids=["both at once", "bare", "on, bare", "a number", "filter above", "on above"],
)
def test_a_function_registered_the_wrong_way_is_an_error_that_shows_the_right_one(register, said):
    def note(step): ...

    with pytest.raises(HookError, match=said):
        register(quiet(), note)


# ---- in a notebook, or at a prompt -------------------------------------------------------------------------------


class Session:
    """A real interactive interpreter: cells are compiled one by one and define names of `__main__`."""

    def __init__(self, **names: Any) -> None:
        self.names = {"__name__": "__main__", "trainer": quiet(), **names}
        self._interpreter = InteractiveInterpreter(self.names)
        self._interpreter.write = self._fail  # what a cell raises would only be printed

    def _fail(self, text: str) -> None:
        raise AssertionError(text)

    def run(self, *cells: str) -> list[str]:
        for cell in cells:
            sys.excepthook = (
                sys.__excepthook__
            )  # packages that other tests import replace it; then nothing is written
            assert self._interpreter.runsource(textwrap.dedent(cell), symbol="exec") is False
        return self.names["trainer"].hooks.list_hooks()


SHOW = "@trainer.on('step_end')\ndef show(step): seen.append(('first', step))\n"


def test_a_cell_that_is_run_again_replaces_its_function():
    seen = []
    session = Session(seen=seen)
    assert session.run(SHOW, SHOW) == ["show"]
    old = session.names["show"]
    assert session.run(SHOW.replace("first", "edited")) == ["show"]
    old.remove()  # the handle of what is gone removes nothing else
    session.names["trainer"].fit(Net(), batches(2))
    assert seen == [("edited", 1), ("edited", 2)]


def test_one_definition_that_is_carried_out_several_times_makes_several_hooks():
    loop = "for i in range(3):\n    @trainer.on('step_end')\n    def looped(i=i): ...\n"
    closure = "def make(i):\n    @trainer.on('step_end')\n    def made(): return i\nmake(1); make(2)\n"
    session = Session()
    assert session.run(loop) == session.run(loop) == ["looped", "looped_2", "looped_3"]
    assert (
        session.run(closure) == session.run(closure) == ["looped", "looped_2", "looped_3", "made", "made_2"]
    )


PROBE = "class Probe(Hook):\n    def on_step_end(self, step): seen.append(('first', step))\n\ntrainer.add_hook(Probe())\n"


def test_a_cell_that_defines_a_hooks_class_and_adds_it_can_be_run_again():
    seen = []
    session = Session(seen=seen, Hook=Hook)
    assert session.run(PROBE, PROBE, PROBE.replace("first", "edited")) == ["probe"]
    session.names["trainer"].fit(Net(), batches(2))
    assert seen == [("edited", 1), ("edited", 2)]
    assert session.run("trainer.add_hook(Probe())\n") == ["probe", "probe_2"]  # one class, two hooks


def test_an_edited_class_that_is_refused_leaves_the_hook_that_was_there():
    session = Session(seen=[], Hook=Hook)
    session.run(PROBE)
    with pytest.raises(AssertionError, match="stpe.*Did you mean 'step'"):
        session.run(PROBE.replace("self, step", "self, stpe"))
    assert session.run() == ["probe"]


def test_classes_that_a_function_makes_are_hooks_of_their_own():
    made = "def make():\n    class Made(Hook):\n        def on_step_end(self): ...\n    trainer.add_hook(Made())\nmake(); make()\n"
    assert Session(Hook=Hook).run(made, made) == ["made", "made_2"]


def test_lambdas_have_no_name_to_be_known_by():
    session = Session()
    cell = "trainer.on('step_end')(lambda: None)\n"
    assert session.run(cell, cell) == ["function", "function_2"]


def test_a_cell_with_a_name_or_several_registrations_can_be_run_again():
    session = Session()
    named = "@trainer.on('step_end', name='mine')\ndef show(): ...\n"
    twice = "@trainer.on('step_end', every=2)\n@trainer.on('train_end')\ndef told(): ...\n"
    assert session.run(named, named) == ["mine"]
    assert session.run(twice, twice) == ["mine", "told", "told_2"]


def test_an_edit_that_is_refused_leaves_the_function_that_was_there():
    seen = []
    session = Session(seen=seen)
    session.run(SHOW)
    with pytest.raises(AssertionError, match="los.*Did you mean 'loss'"):
        session.run("@trainer.on('step_end')\ndef show(los): ...\n")
    session.names["trainer"].fit(Net(), batches(1))
    assert seen == [("first", 1)] and session.run() == ["show"]


def test_functions_of_one_name_in_a_script_are_all_registered(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from hookline import Trainer\ntrainer = Trainer(max_epochs=1, logger=False, enable_progress_bar=False)\n"
        f"{SHOW}{SHOW}print(*trainer.hooks.list_hooks())\n"
    )
    done = preloaded.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["show", "show_2"]


def test_what_a_notebook_shows_can_be_read_and_has_no_addresses():
    trainer = quiet(hooks=[Note([], "mine")])
    trainer.on("step_end", every="2 steps")(lambda step: None)
    trainer.disable_hook("mine")
    assert repr(trainer) == "<Trainer: no run yet; hooks: mine, function>"
    assert repr(trainer.hooks).splitlines() == [
        "2 hooks:",
        "  mine (Note, switched off): setup, on_train_start, on_train_batch_end, on_train_end, teardown",
        "  function (function): on_step_end every 2 steps",
    ]
    assert repr(quiet().hooks) == "no hooks"
    cells = re.findall(r"<td[^>]*>(.*?)</td>", trainer.hooks._repr_html_())
    assert cells[0] == "mine (Note, switched off)" and cells[1].startswith("setup, on_train_start, ")
    assert cells[2:] == ["function (function)", "on_step_end every 2 steps"]
    assert repr(trainer.explain()) == str(trainer.explain())
    trainer.fit(Net(), batches(3))
    assert repr(trainer) == "<Trainer: fit completed at step 3, 1 epoch; hooks: mine, function>"

    class Callable:
        def __call__(self, step): ...

    trainer.on("step_end")(Callable())
    shown = [
        trainer.on("step_end"),
        list(trainer.hooks),
        trainer.hooks.add(every(2)(on("step_end")(lambda: None))),
        trainer.loggers,
        trainer.strategy,
        trainer.tracing,
        trainer.state,
        trainer.explain(),
        trainer.explain().data(),
        trainer.metrics,
    ]
    assert not [each for each in map(repr, shown) if re.search(r"0x[0-9a-f]{6}", each)]
