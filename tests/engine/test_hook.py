"""`Hook` and `@on`: settings, names, state, and functions as hooks."""

from __future__ import annotations

import pytest
from tiny import Net, batches, quiet

from hookline import Hook, HookError, OptionError, on
from hookline.engine.hook import snake_case


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Report", "report"),
        ("GradientMonitor", "gradient_monitor"),
        ("LRMonitor", "lr_monitor"),
        ("Top5Accuracy", "top5_accuracy"),
    ],
)
def test_a_hook_is_called_after_its_class(name, expected):
    assert snake_case(name) == expected
    hook = type(name, (Hook,), {"on_train_start": lambda self: None})
    assert quiet(hooks=[hook()]).hooks.list_hooks() == [expected]


def test_a_hook_may_name_itself():
    class Report(Hook):
        name = "from the class"

    assert quiet(hooks=[Report()]).hooks.list_hooks() == ["from the class"]
    assert quiet(hooks=[Report("from the instance")]).hooks.list_hooks() == ["from the instance"]


def test_a_hook_that_forgets_super_init_works():
    class Forgetful(Hook):
        def __init__(self):
            self.calls = 0

        def on_train_batch_end(self):
            self.calls += 1

    hook = Forgetful()
    quiet(hooks=[hook]).fit(Net(), batches(2))
    assert hook.calls == 2


def test_an_attribute_called_enabled_is_the_users_own():
    class Switched(Hook):
        enabled = False
        calls = 0

        def on_train_batch_end(self):
            self.calls += 1

    hook = Switched()
    quiet(hooks=[hook]).fit(Net(), batches(2))
    assert hook.calls == 2


def test_calling_the_base_classes_stubs_is_allowed():
    class Polite(Hook):
        def on_train_start(self, trainer, module):
            assert super().on_train_start(trainer, module) is None

    quiet(hooks=[Polite()]).fit(Net(), batches(1))


def test_a_hook_can_be_passed_as_a_class():
    got = []

    class Report(Hook):
        def on_train_start(self):
            got.append("heard")

    quiet(hooks=[Report]).fit(Net(), batches(1))
    assert got == ["heard"]


def test_a_class_that_needs_arguments_is_refused_with_the_way_to_pass_it():
    class Needs(Hook):
        def __init__(self, threshold): ...

    with pytest.raises(HookError, match=r"Pass an instance: Needs\(...\)"):
        quiet(hooks=[Needs])


@pytest.mark.parametrize(
    ("attribute", "value", "allowed"),
    [
        ("tier", "admin", "'user', 'builtin', 'monitor'"),
        ("order", "first", "a whole number"),
        ("order", True, "a whole number"),
        ("order", 1.5, "a whole number"),
        ("on_error", "ignore", "'raise', 'warn', 'disable'"),
        ("ranks", "one", "'all', 'zero' or a set of ranks"),
        ("ranks", 5, "'all', 'zero' or a set of ranks"),
        ("after_module", "on_step_end", "True, False or a set of event names"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_at_registration(attribute, value, allowed):
    wrong = type("Wrong", (Hook,), {attribute: value, "on_train_start": lambda self: None})
    with pytest.raises(HookError) as caught:
        quiet(hooks=[wrong()])
    assert f"hook 'wrong' (Wrong): {attribute}={value!r}" in str(caught.value)
    assert allowed in str(caught.value)


def test_after_module_names_are_checked():
    class Wrong(Hook):
        after_module = {"on_steps_end"}

    with pytest.raises(HookError, match="Did you mean 'on_step_end'"):
        quiet(hooks=[Wrong()])


@pytest.mark.parametrize(
    ("ranks", "hears"),
    [("all", True), ("zero", True), ({0, 3}, True), ([1], False)],
    ids=["all", "zero", "some", "another"],
)
def test_a_hook_hears_events_on_the_ranks_it_names(ranks, hears):
    got = []
    hook = type(
        "Picky",
        (Hook,),
        {
            "ranks": ranks,
            "setup": lambda self: got.append("setup"),
            "on_train_start": lambda self: got.append("start"),
        },
    )
    trainer = quiet(hooks=[hook()])
    trainer.fit(Net(), batches(1))
    assert got == (["setup", "start"] if hears else [])
    assert trainer.hooks.list_hooks() == ["picky"]


def test_state_goes_into_a_checkpoint_and_back_into_the_hook_of_the_same_name(tmp_path):
    class Counting(Hook):
        def __init__(self, name):
            super().__init__(name)
            self.count = 0

        def on_train_batch_end(self):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    first = quiet(hooks=[Counting("a")])
    first.on("train_end")(lambda: first.save_checkpoint(tmp_path / "saved"))
    first.fit(Net(), batches(3))
    same, other = Counting("a"), Counting("b")
    quiet(hooks=[other, same], max_epochs=2).fit(Net(), batches(3), resume=tmp_path / "saved")
    assert (same.count, other.count) == (6, 3)


# ---- functions ---------------------------------------------------------------------------------------------------


def test_a_marked_function_is_a_hook_and_still_a_function():
    got = []

    @on("train_batch_end", every=2)
    def report(step):
        got.append(step)

    report("called directly")
    trainer = quiet(hooks=[report])
    trainer.fit(Net(), batches(4))
    assert got == ["called directly", 2, 4]
    assert trainer.hooks.list_hooks() == ["report"]


def test_one_marked_function_serves_two_trainers():
    got = []

    @on("train_batch_end", every=2)
    def report(trainer):
        got.append(trainer)

    first, second = quiet(hooks=[report]), quiet(hooks=[report])
    first.fit(Net(), batches(3))
    second.fit(Net(), batches(3))
    assert got == [first, second]


def test_a_function_registered_by_the_trainers_decorator_can_still_be_called():
    trainer = quiet()

    @trainer.on("train_end")
    def double(step):
        return 2 * step

    assert double(4) == 8
    assert double(step=5) == 10
    assert double.name == "double"


def test_marks_of_several_events_may_be_stacked():
    got = []

    @on("train_start")
    @on("train_end")
    def note(step):
        got.append(step)

    quiet(hooks=[note]).fit(Net(), batches(1))
    assert got == [0, 1]


def test_an_unknown_event_is_refused_before_the_function_is_even_given():
    with pytest.raises(HookError, match="Did you mean '(on_)?train_batch_end'"):
        quiet().on("train_bach_end")


def test_a_marked_functions_unknown_event_is_refused_when_it_is_added():
    @on("train_bach_end")
    def report(): ...

    with pytest.raises(HookError, match="Did you mean '(on_)?train_batch_end'"):
        quiet(hooks=[report])


def test_a_function_without_a_mark_is_refused():
    def report(step): ...

    with pytest.raises(HookError, match="@on"):
        quiet(hooks=[report])


@pytest.mark.parametrize("wrong", ["progress_bar", {"a": Hook()}], ids=["text", "mapping"])
def test_hooks_are_passed_as_one_or_as_a_list(wrong):
    with pytest.raises(OptionError, match="hooks= takes a hook or a list of hooks"):
        quiet(hooks=wrong)


def test_callbacks_is_another_word_for_hooks():
    class First(Hook): ...

    class Second(Hook): ...

    assert quiet(callbacks=[Second()], hooks=[First()]).hooks.list_hooks() == ["first", "second"]
