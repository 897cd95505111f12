"""`explain` shows the plan that runs: every listener with where it is written, what it asks for, when, and why there."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from spies import Scene, stepped_by_step
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader, TensorDataset, default_collate

import hookline
from hookline import EVENTS, DataModule, Hook, HookError, HooklineError, Recorder, Trainer, every
from hookline.engine.events import EVENT_ROWS


class Watch(Hook):
    on_error = "warn"

    @every("10 steps")
    def on_step_end(self, step, loss): ...

    def on_validation_end(self, metrics): ...


class Late(Hook):
    order = 50

    def on_step_end(self): ...


class Best(Hook):
    tier = "monitor"

    def on_train_epoch_end(self): ...


class Listening(Net):
    def on_train_epoch_end(self, epoch): ...


def moment(explanation, event):
    return next(row for row in explanation.data() if row["event"] == event)


def listeners(explanation, event):
    return moment(explanation, event)["listeners"]


def test_a_listener_is_shown_with_all_that_is_known_about_it():
    (watch,) = listeners(quiet(hooks=[Watch()]).explain(), "on_step_end")
    line = Watch.on_step_end.__code__.co_firstlineno
    assert watch == {
        "receiver": "hooks",
        "name": "watch",
        "function": "Watch.on_step_end",
        "origin": f"{__file__}:{line}",
        "asks": ["step", "loss"],
        "when": "every 10 steps",
        "on_error": "warn",
        "why": "user hook",
    }


def test_the_text_says_the_same():
    text = str(quiet(hooks=[Watch()]).explain())
    line = next(line for line in text.splitlines() if "on_step_end (" in line)
    for part in ("watch", "test_explain.py:", "requests step, loss", "every 10 steps", "user hook"):
        assert part in line
    assert text.splitlines()[0] == "trainer.fit()"
    assert "each epoch" in text and "each batch" in text


def test_only_events_with_listeners_are_printed_unless_asked_for_everything():
    explanation = quiet(hooks=[Watch()]).explain()
    assert "on_train_start" not in str(explanation)
    assert "on_train_start" in explanation.text(everything=True)


def test_listeners_are_shown_in_the_order_they_are_called_with_the_reason():
    trainer = quiet(hooks=[Best(), Late(), Watch()])
    trainer.on("step_end", "train_epoch_end", name="function")(lambda: None)
    explanation = trainer.explain(Listening())
    assert [(each["name"], each["why"]) for each in listeners(explanation, "on_step_end")] == [
        ("watch", "user hook, number 1 of 2 by registration"),
        ("function", "user hook, number 2 of 2 by registration"),
        ("late", "order=50"),
    ]
    assert [
        (each["receiver"], each["name"], each["why"]) for each in listeners(explanation, "on_train_epoch_end")
    ] == [
        ("hooks", "function", "user hook"),
        ("module", "Listening", "order of receivers: hooks → module"),
        ("hooks", "best", "a monitor: after the module"),
    ]


def test_every_hook_method_of_the_run_is_in_the_data():
    trainer = quiet(hooks=[Watch(), Late(), Best()])
    shown = {
        (row["event"], each["name"])
        for row in trainer.explain(Listening()).data()
        for each in row["listeners"]
    }
    assert shown >= {
        ("on_step_end", "watch"),
        ("on_validation_end", "watch"),
        ("on_step_end", "late"),
        ("on_train_epoch_end", "best"),
        ("on_train_epoch_end", "Listening"),
        ("training_step", "Listening"),
        ("configure_optimizers", "Listening"),
    }


def test_the_order_of_listeners_is_the_one_a_recorded_run_shows():
    trainer, module = quiet(hooks=[Best(), Late(), Watch()], log_every_n_steps=1), Listening()
    explanation = trainer.explain(module)
    with Recorder(trainer, events=["on_train_epoch_end"]) as recorder:
        trainer.fit(module, batches(1))
    assert [call.name for call in recorder.calls] == [
        each["name"] for each in listeners(explanation, "on_train_epoch_end")
    ]


@pytest.mark.parametrize(
    ("stage", "has", "lacks"),
    [
        (
            "fit",
            {"on_fit_start", "training_step", "on_validation_end", "on_train_end"},
            {"on_test_start", "on_predict_start"},
        ),
        (
            "validate",
            {"on_validation_start", "validation_step", "teardown"},
            {"training_step", "on_fit_start"},
        ),
        ("test", {"on_test_start", "test_step", "setup"}, {"validation_step", "on_train_start"}),
        (
            "predict",
            {"on_predict_start", "predict_step", "on_exception"},
            {"test_step", "on_validation_start"},
        ),
    ],
)
def test_each_verb_has_its_own_tree(stage, has, lacks):
    explanation = quiet().explain(Net(), stage=stage)
    events = {row["event"] for row in explanation.data()}
    assert has <= events
    assert not lacks & events
    assert explanation.text(everything=True).startswith(f"trainer.{stage}()")
    assert {row["event"] for row in explanation.data()} == {
        event.name for event in EVENTS if stage in event.stages
    }


def test_the_batches_of_a_verb_stand_in_its_own_branch():
    branch = {
        stage: moment(quiet().explain(stage=stage), "on_before_batch_transfer")["branch"]
        for stage in ("fit", "validate", "test", "predict")
    }
    assert branch["fit"].startswith("each epoch/each batch")
    assert branch["validate"].startswith("validation/each batch")
    assert branch["test"].startswith("test/each batch")
    assert branch["predict"].startswith("predict/each batch")


def test_an_unknown_verb_is_an_error_with_the_closest():
    with pytest.raises(HookError, match="'validat' is not a stage. Did you mean 'validate'"):
        quiet().explain(stage="validat")
    with pytest.raises(HookError, match="'validat' is not a stage. Did you mean 'validate'"):
        quiet().explain(Net(), stage="validat")


def test_the_tree_as_such_needs_no_trainer():
    text = str(hookline.explain())
    assert "on_train_start" in text and "training_step" in text
    assert str(hookline.explain(quiet(hooks=[Watch()]))) == str(quiet(hooks=[Watch()]).explain())


def test_data_modules_and_declared_events_are_shown():
    class Data(DataModule):
        def setup(self, stage): ...

        def train_dataloader(self):
            return batches(1)

    EVENTS.declare("on_reward", ("reward",), "A reward came in.")
    try:
        trainer = quiet()
        trainer.on("reward", name="mine")(lambda reward: None)
        explanation = trainer.explain(Net(), datamodule=Data())
    finally:
        EVENTS.forget("on_reward")
    assert [each["receiver"] for each in listeners(explanation, "setup")] == ["data module"]
    assert [each["receiver"] for each in listeners(explanation, "train_dataloader")] == ["data module"]
    assert [each["asks"] for each in listeners(explanation, "on_reward")] == [["reward"]]


def test_a_data_module_in_place_of_loaders_is_shown_and_not_called():
    class Data(DataModule):
        def train_dataloader(self):
            raise AssertionError("its setup was not called yet")

    explanation = quiet().explain(Net(), Data())
    assert [each["receiver"] for each in listeners(explanation, "train_dataloader")] == ["data module"]


def test_a_removed_or_disabled_hook_is_not_shown():
    trainer = quiet(hooks=[Watch(), Late()])
    trainer.disable_hook("watch")
    trainer.remove_hook("late")
    assert listeners(trainer.explain(), "on_step_end") == []


def test_explain_can_be_asked_in_the_middle_of_a_run():
    got = []
    trainer = quiet(hooks=[Watch()])
    trainer.on("train_start", once=True)(lambda: got.append(trainer.explain()))
    trainer.fit(Listening(), batches(1))
    assert [each["name"] for each in listeners(got[0], "on_train_epoch_end")] == ["Listening"]


def test_a_wrong_module_is_refused_as_it_would_be_by_fit():
    class Wrong(Net):
        def on_train_begins(self): ...

    with pytest.raises(HookError, match="on_train_begins is not an event"):
        quiet().explain(Wrong())


def test_explaining_writes_nothing_and_leaves_the_module_alone():
    trainer = Trainer(enable_progress_bar=False)
    module = Net()
    trainer.explain(module)
    assert list(Path.cwd().iterdir()) == []
    with pytest.raises(HooklineError, match="not in a run"):
        module.log("x", 1.0)


def test_explaining_after_a_run_forgets_nothing_of_it():
    trainer, module = quiet(hooks=[Watch()]), Listening()
    trainer.on("train_batch_end")(lambda: None)
    trainer.fit(module, batches(2))
    before = (trainer.status, dict(trainer.metrics), trainer.global_step, len(trainer.hooks.cost()))
    trainer.explain(module)
    assert (trainer.status, dict(trainer.metrics), trainer.global_step, len(trainer.hooks.cost())) == before


def rendered(explanation):
    console = Console(file=io.StringIO(), width=300)
    console.print(explanation)
    return console.file.getvalue()


def test_rich_renders_the_same_listeners():
    explanation = quiet(hooks=[Watch(), Best()]).explain(Listening())
    shown = rendered(explanation)
    for line in str(explanation).splitlines():
        assert line.strip("│├└─ ") in shown


def test_rich_shows_the_whole_lifecycle_without_listeners():
    explanation = hookline.explain()
    assert [line.strip("│├└─ ") for line in rendered(explanation).splitlines()] == [
        line.strip("│├└─ ") for line in str(explanation).splitlines()
    ]


def test_rich_takes_square_brackets_in_names_literally():
    trainer = quiet(hooks=[Late("loss[val]")])
    assert "loss[val]" in rendered(trainer.explain())


# ---- the order: of the table, of `explain` and of the page, against runs that were recorded ------------------------

PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"


def happened(stage):
    """The events of a real run with listeners everywhere, each where it came first; the sanity check's validation left out."""
    saves = {"plain on_step_end": lambda state: state.trainer.save_checkpoint() if state.step == 2 else None}
    scene = Scene(does=saves if stage == "fit" else {}, optimizers=stepped_by_step, gradient_clip_val=1.0)
    names = [call.event for call in scene.run(stage)]
    if stage == "fit":
        begin, end = names.index("on_sanity_check_start"), names.index("on_sanity_check_end")
        names = [
            name for at, name in enumerate(names) if not begin < at < end or name.startswith("on_sanity")
        ]
    return [name for name in dict.fromkeys(names) if name in EVENTS]


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_the_tree_is_in_the_order_of_a_real_run(stage):
    real = happened(stage)
    assert len(real) > 15
    assert [row["event"] for row in hookline.explain(stage=stage).data() if row["event"] in real] == real


def test_the_page_is_in_the_order_of_a_real_run():
    on_page = re.findall(r"^\| `(\w+)`.*\| (?:[DHMS] ?)+ \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert on_page == [event.name for event in EVENT_ROWS]
    real = happened("fit")
    assert [name for name in on_page if name in real] == real
    assert (
        on_page.index("on_sanity_check_end")
        < on_page.index("on_train_start")
        < on_page.index("on_train_epoch_start")
    )


class Counted:
    """A loader with a state."""

    def __iter__(self) -> Any:
        return iter(batches(1))

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


ROWS = TensorDataset(torch.zeros(4, 4), torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("loader", "how"),
    [
        (batches(2), "as a list: its batches are used as they are"),
        (DataLoader(ROWS, 2, shuffle=True), "in memory: one indexing operation for each tensor"),
        (
            DataLoader(ROWS, 2, collate_fn=lambda samples: default_collate(samples)),
            "by index: torch's fetcher is called directly",
        ),
        (DataLoader(ROWS, 2, num_workers=2), "by index, with torch's iterator and 2 workers"),
        (DataLoader(ROWS, None), "by index, with the loader's own iterator"),
        (Counted(), "by its own state, which is saved with the run"),
        (
            map(tuple, batches(2)),
            "as an iterable, with separate random streams; a resume reads the epoch again",
        ),
    ],
    ids=["list", "in memory", "direct", "workers", "single samples", "state", "iterable"],
)
def test_it_shows_how_each_loader_is_read(loader: Any, how: str) -> None:
    explanation = quiet().explain(Net(), loader)
    assert explanation.loaders == {"train": how}
    assert explanation.text().endswith(f"\n\nhow loaders are read\n  train  {how}")
    several = quiet().explain(Net(), {"web": loader, "code": batches(1)}, mixture={"epoch_length": 2})
    assert list(several.loaders) == ["train web", "train code"] and several.loaders["train web"] == how


def test_during_a_run_it_shows_the_loaders_that_are_read() -> None:
    shown: list[dict[str, str]] = []

    class Looks(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            shown.append(self.trainer.explain().loaders)
            return super().validation_step(batch, batch_idx)

    quiet().fit(Looks(), DataLoader(ROWS, 4), batches(1))
    assert {name: how.partition(":")[0] for name, how in shown[0].items()} == {
        "train": "in memory",
        "val": "as a list",
    }


def test_the_tree_of_a_notebook_shows_how_loaders_are_read() -> None:
    console = Console(width=120, file=io.StringIO())
    console.print(quiet().explain(Net(), batches(1)))
    assert "as a list: its batches are used as they are" in console.file.getvalue()  # type: ignore[attr-defined]


def test_in_a_notebook_it_is_a_tree_of_escaped_texts_that_can_be_folded() -> None:
    trainer = quiet(hooks=[Watch()])
    trainer.hooks.add(Late(), name="<b>late</b>")
    data = {"<i>web</i>": batches(2), "code": batches(2)}
    shown = trainer.explain(Net(), data)._repr_html_()
    assert shown.count("<details open>") == shown.count("</details>") > 3
    assert "<summary>each epoch</summary>" in shown
    assert "<b>on_step_end</b>" in shown
    assert "&lt;b&gt;late&lt;/b&gt;" in shown and "<b>late" not in shown
    assert "&lt;i&gt;web&lt;/i&gt;" in shown and "<i>web" not in shown
    assert "on_fit_start" not in shown  # no listener
    assert "on_fit_start" in hookline.explain()._repr_html_()


def test_a_notebook_shows_long_branches_folded() -> None:
    class Listens(Hook):
        def on_train_batch_start(self) -> None: ...
        def on_train_batch_end(self) -> None: ...
        def on_step_end(self) -> None: ...

    few = quiet(hooks=[Listens()]).explain(Net(), batches())._repr_html_()
    assert "<details open><summary>each epoch</summary>" in few
    many = quiet(hooks=[Listens() for _ in range(6)]).explain(Net(), batches())._repr_html_()
    assert re.search(
        r"<details open><summary>trainer.fit\(\)</summary>.*<details><summary>each epoch · ", many
    )


def test_places_in_installed_packages_are_relative_to_the_packages(tmp_path: Path) -> None:
    folder = tmp_path / "venv" / "lib" / "site-packages" / "watching"
    folder.mkdir(parents=True)
    source = "from hookline import Hook\n\n\nclass Watch(Hook):\n    def on_step_end(self): ...\n"
    (folder / "watch.py").write_text(source)
    spec = importlib.util.spec_from_file_location("watching.watch", folder / "watch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = quiet(hooks=[module.Watch()]).explain(Net(), batches()).text()
    assert f"({os.path.join('watching', 'watch.py')}:5)" in text
