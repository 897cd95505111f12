"""Where a run writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import Net, batches, quiet

from hookline import Hook, OptionError


class Starts(Hook):
    """Remembers that training has begun."""

    started = False

    def on_train_start(self) -> None:
        self.started = True


def test_each_run_gets_a_directory_of_its_own_and_one_that_was_asked_for_is_used() -> None:
    trainer = quiet()
    asked = trainer.run_dir
    trainer.fit(Net(), batches(1))
    assert trainer.run_dir == asked
    trainer.fit(Net(), batches(1))
    assert trainer.run_dir != asked
    assert asked.parent == trainer.run_dir.parent == Path("runs")


def test_a_given_directory_serves_every_run() -> None:
    trainer = quiet(run_dir="mine")
    trainer.fit(Net(), batches(1))
    assert trainer.run_dir == Path("mine")


@pytest.mark.parametrize("below", ["", "/deeper/still"])
def test_a_directory_that_cannot_be_made_is_refused_before_the_first_step(below: str) -> None:
    Path("taken").write_text("a file")
    trainer = quiet(run_dir=f"taken{below}")
    with pytest.raises(OptionError, match=r"run_dir='taken.*' cannot be a directory: .*taken is a file"):
        trainer.fit(Net(), batches(1))
    assert trainer.global_step == 0


needs_proc = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="there is no /proc, where even root can create nothing"
)


@needs_proc
@pytest.mark.parametrize("option", ["run_dir", "default_root_dir"])
@pytest.mark.parametrize("place", ["/proc/x", "/proc/self/deeper/still"])
def test_so_is_one_in_which_nothing_can_be_created_even_by_root(option: str, place: str) -> None:
    trainer = quiet(**{option: place, "hooks": [(hook := Starts())]})
    with pytest.raises(
        OptionError, match=f"{option}='{place}' cannot be written to: nothing can be created in /proc"
    ):
        trainer.fit(Net(), batches(1))
    assert not hook.started and trainer.global_step == 0


@pytest.mark.parametrize("option", ["run_dir", "default_root_dir"])
def test_so_is_one_that_is_too_long_as_a_whole(option: str) -> None:
    trainer = quiet(**{option: "a/" * 3000, "hooks": [(hook := Starts())]})
    with pytest.raises(
        OptionError, match=rf"{option}='a/a/[a/]*\.\.\.' cannot be written to: .*File name too long"
    ):
        trainer.fit(Net(), batches(1))
    assert not hook.started and not list(Path().iterdir())


@needs_proc
def test_an_evaluation_that_writes_nothing_needs_no_directory_and_one_that_does_says_what_is_wrong() -> None:
    assert "val/loss" in quiet(run_dir="/proc/x").validate(Net(), batches(1))
    with pytest.raises(OptionError, match="The run's directory /proc/x cannot be created"):
        _ = quiet(run_dir="/proc/x").run_dir


@pytest.mark.parametrize("option", ["run_dir", "default_root_dir", "trace"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "must be .*path.*, and is empty"),
        ("  ", "and is empty"),
        ("a\0b", "NUL character"),
        ("x" * 300, "300 bytes, and a name may have 255"),
        ("a/" + "ä" * 200, "400 bytes"),
        (3, "must be .*path"),
        (["x"], "must be .*path"),
    ],
    ids=["empty", "blank", "NUL", "long", "long in bytes", "a number", "a list"],
)
def test_what_can_be_no_path_is_refused_when_the_trainer_is_made(
    option: str, value: object, said: str
) -> None:
    with pytest.raises(OptionError, match=f"(?s){option}=.*{said}"):
        quiet(**{option: value})


def test_looking_whether_a_directory_can_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    quiet(run_dir=tmp_path / "a" / "b", control=False).fit(Net(), batches(1))
    assert [each.name for each in tmp_path.iterdir()] in ([], ["a"])
    quiet(default_root_dir=tmp_path / "c", control=False).fit(Net(), batches(1))
    assert not list(tmp_path.rglob(".hookline*"))
