"""Uploading checkpoints: whole, in the background, finished before the run ends, and never fatal."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tiny import Net, batches, quiet

from hookline import Hook, HookError, OptionError
from hookline.checkpoint.files import read
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.upload_checkpoint import UploadCheckpoint
from hookline.run.save_request import SAVE_REASONS
from hookline.util.urls import PROTOCOLS


@pytest.fixture(autouse=True)
def allowed(memory_urls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """memory:// as any test may have it, and the slow one below in the place of an allowed one."""
    monkeypatch.setattr("hookline.util.urls.PROTOCOLS", (*PROTOCOLS, "odd"))


class Odd(MemoryFileSystem):
    """A file system in memory that can be slow, fail, and tell what was put in which order."""

    protocol = "odd"
    cachable = False
    gate = threading.Event()
    failures = 0
    order: list[str] = []

    def put_file(
        self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        assert type(self).gate.wait(120)
        if type(self).failures > 0:
            type(self).failures -= 1
            raise OSError("the line odd://user:secret@host is dead")
        type(self).order.append(rpath)
        with open(lpath, "rb") as file:
            self.pipe_file(rpath, file.read())


@pytest.fixture
def odd() -> Iterator[type[Odd]]:
    fsspec.register_implementation("odd", Odd, clobber=True)
    Odd.gate.set()
    Odd.failures, Odd.order = 0, []
    yield Odd
    Odd.gate.set()


def upload(hook: UploadCheckpoint, *more: Any, **options: Any) -> Any:
    """Two epochs of two batches, a checkpoint each."""
    saver = ModelCheckpoint(save_top_k=-1, filename="s{step}", auto_insert_metric_name=False)
    trainer = quiet(**{"max_epochs": 2, "run_dir": "run", "hooks": [saver, hook, *more], **options})
    trainer.fit(Net(), batches(2))
    return trainer


def test_each_checkpoint_arrives_whole_before_the_run_ends(tmp_path: Path) -> None:
    hook = UploadCheckpoint(f"file://{tmp_path}/backup")
    upload(hook)
    assert hook.uploaded == ["s2", "s4"]
    for name in ("s2", "s4"):
        assert read(tmp_path / "backup" / name)["counters"]["step"] == int(
            name[1:]
        )  # reading checks every fingerprint
    assert not (tmp_path / "run" / ".uploads").exists()


def test_it_goes_through_any_file_system() -> None:
    upload(UploadCheckpoint("memory://bucket/run"))
    there = fsspec.filesystem("memory").ls("/bucket/run/s4", detail=False)
    assert sorted(Path(each).name for each in there) == [
        "manifest.json",
        "model.safetensors",
        "state.json",
        "state.safetensors",
    ]


def test_the_manifest_comes_last(odd: type[Odd]) -> None:
    upload(UploadCheckpoint("odd://bucket"))
    order = [each.rsplit("/", 2)[-2:] for each in odd.order]
    assert [name for name, file in order if file == "manifest.json"] == ["s2", "s4"]
    assert order[3] == ["s2", "manifest.json"] and order[7] == ["s4", "manifest.json"]


def test_training_continues_while_it_uploads_and_the_end_waits(odd: type[Odd]) -> None:
    odd.gate.clear()
    seen: list[Any] = []
    hook = UploadCheckpoint("odd://bucket")

    class AtTheEnd(Hook):
        def on_train_end(self, step: int) -> None:
            seen.append((step, list(hook.uploaded)))
            odd.gate.set()

    upload(hook, AtTheEnd())
    assert seen == [(4, [])]
    assert hook.uploaded == ["s2", "s4"]


def test_one_that_is_pruned_meanwhile_is_still_uploaded(odd: type[Odd], tmp_path: Path) -> None:
    odd.gate.clear()
    hook = UploadCheckpoint("odd://bucket")
    saver = ModelCheckpoint(save_top_k=1, save_last=True, filename="s{step}", auto_insert_metric_name=False)
    trainer = quiet(max_epochs=2, run_dir="run", hooks=[saver, hook])
    hook.max_waiting = 10
    trainer.on("train_end")(lambda: odd.gate.set())
    trainer.fit(Net(), batches(2))
    assert sorted(each.name for each in Path("run/checkpoints").iterdir()) == ["last", "s4"]
    assert sorted(set(hook.uploaded)) == ["last", "s2", "s4"]
    fsspec.filesystem("odd").get(f"{hook._root}/last", str(tmp_path / "copy"), recursive=True)
    copy = tmp_path / "copy" if (tmp_path / "copy" / "manifest.json").exists() else tmp_path / "copy" / "last"
    assert read(copy)["counters"]["step"] == 4


def test_a_full_queue_gives_up_the_oldest_and_says_so(
    odd: type[Odd], caplog: pytest.LogCaptureFixture
) -> None:
    odd.gate.clear()
    hook = UploadCheckpoint("odd://bucket", max_waiting=1)
    saver = ModelCheckpoint(
        every_n_train_steps=1, save_top_k=-1, filename="s{step}", auto_insert_metric_name=False
    )
    trainer = quiet(max_epochs=1, run_dir="run", hooks=[saver, hook], checkpoint=True)
    started = threading.Event()
    trainer.on("train_end")(lambda: odd.gate.set())
    trainer.on("checkpoint_save")(
        lambda step: started.wait(0.2) if step == 1 else None
    )  # the thread takes the first one up
    with caplog.at_level(logging.WARNING, "hookline"):
        trainer.fit(Net(), batches(5))
    assert hook.uploaded[-1] == "last"
    assert hook.failed and set(hook.failed) | set(hook.uploaded) == {"s1", "s2", "s3", "s4", "s5", "last"}
    assert "newer ones are waiting" in caplog.text


def test_a_failure_is_tried_again(odd: type[Odd], caplog: pytest.LogCaptureFixture) -> None:
    hook = UploadCheckpoint("odd://bucket", attempts=3)
    hook.pause = 0.001
    odd.failures = 2
    with caplog.at_level(logging.WARNING, "hookline"):
        upload(hook)
    assert hook.uploaded == ["s2", "s4"]
    assert hook.failed == []


def test_what_cannot_be_uploaded_is_reported_and_the_run_continues(
    odd: type[Odd], caplog: pytest.LogCaptureFixture
) -> None:
    hook = UploadCheckpoint("odd://user:secret@host/bucket", attempts=1)
    odd.failures = 1
    with caplog.at_level(logging.WARNING, "hookline"):
        trainer = upload(hook)
    assert trainer.status == "completed"
    assert (hook.failed, hook.uploaded) == (["s2"], ["s4"])
    assert "s2 is not uploaded" in caplog.text and "not uploaded in this run: s2" in caplog.text
    assert "secret" not in caplog.text
    assert [each.rsplit("/", 2)[-2] for each in odd.order if each.endswith("manifest.json")] == ["s4"]


def test_an_upload_that_hangs_does_not_hold_the_run_for_ever(
    odd: type[Odd], caplog: pytest.LogCaptureFixture
) -> None:
    odd.gate.clear()
    with caplog.at_level(logging.WARNING, "hookline"):
        trainer = upload(hook := UploadCheckpoint("odd://bucket", timeout=0.1))
    assert trainer.status == "completed"
    assert "the upload of s2 still hangs and is given up, with s4 behind it" in caplog.text
    assert "not uploaded in this run: s2, s4" in caplog.text and hook.failed == ["s2", "s4"]


def test_only_the_newest_are_kept_there_also_after_a_resume() -> None:
    memory = fsspec.filesystem("memory")
    upload(UploadCheckpoint("memory://bucket", keep=1))
    assert [Path(each).name for each in memory.ls("/bucket", detail=False)] == ["s4"]
    hook = UploadCheckpoint("memory://bucket", keep=2)
    saver = ModelCheckpoint(save_top_k=-1, filename="s{step}", auto_insert_metric_name=False)
    quiet(max_epochs=4, run_dir="run", hooks=[saver, hook]).fit(
        Net(), batches(2), resume="run/checkpoints/s4"
    )
    assert [Path(each).name for each in memory.ls("/bucket", detail=False)] == ["s6", "s8"]


def test_only_some_reasons() -> None:
    hook = UploadCheckpoint("memory://bucket", reasons=("last",))
    saver = ModelCheckpoint(save_last=True, filename="s{step}")
    quiet(max_epochs=2, run_dir="run", hooks=[saver, hook]).fit(Net(), batches(2))
    assert hook.uploaded == ["last"]


def test_one_that_is_saved_after_the_run_is_uploaded_at_once() -> None:
    hook = UploadCheckpoint("memory://bucket")
    trainer = upload(hook)
    trainer.save_checkpoint("run/checkpoints/final")
    assert hook.uploaded[-1] == "final"
    assert fsspec.filesystem("memory").exists("/bucket/final/manifest.json")


def test_a_failing_run_still_uploads_what_it_saved() -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ValueError("boom")
            return super().training_step(batch, batch_idx)

    hook = UploadCheckpoint("memory://bucket")
    with pytest.raises(ValueError, match="boom"):
        quiet(run_dir="run", hooks=[ModelCheckpoint(save_on_exception=True), hook]).fit(Failing(), batches(5))
    assert hook.uploaded == ["exception-step=3"]


def test_an_unknown_protocol_is_refused_before_the_first_step() -> None:
    with pytest.raises(
        OptionError, match=r"UploadCheckpoint: url: the protocol of 'nowhere://bucket' is not allowed"
    ) as caught:
        UploadCheckpoint("nowhere://user:secret@bucket")
    assert "secret" not in str(caught.value) and "s3" in str(caught.value)


@pytest.mark.parametrize("options", [{"protocol": "memory"}, {"no_such_option": object()}])
def test_options_cannot_choose_another_file_system(options: dict[str, Any], tmp_path: Path) -> None:
    hook = UploadCheckpoint(f"file://{tmp_path}/backup", storage_options=options)
    upload(hook)
    assert (tmp_path / "backup" / "s4" / "manifest.json").exists()


def test_a_protocol_that_needs_a_package_says_which() -> None:
    missing = next((each for each in ("s3", "gs", "az", "sftp", "http") if not _importable(each)), None)
    if missing is None:
        pytest.skip("every package of fsspec is installed")
    with pytest.raises(HookError, match="install"):
        quiet(hooks=[UploadCheckpoint(f"{missing}://bucket")]).fit(Net(), batches(1))


def _importable(protocol: str) -> bool:
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError:
        return False
    return True


def test_links_are_not_possible_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.link", _refuse)
    upload(UploadCheckpoint(f"file://{tmp_path}/backup"))
    assert read(tmp_path / "backup" / "s4")["counters"]["step"] == 4
    shutil.rmtree(tmp_path / "backup")


def _refuse(*paths: Any) -> None:
    raise OSError("no links here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "bucket/x"}, "must be a URL"),
        ({"url": None}, "url=None"),
        ({"url": "file:///x", "keep": 0}, "keep=0"),
        ({"url": "file:///x", "max_waiting": 0}, "max_waiting=0"),
        ({"url": "file:///x", "attempts": 0}, "attempts=0"),
        ({"url": "file:///x", "timeout": -1}, "timeout=-1"),
        ({"url": "file:///x", "reasons": ("bset",)}, "Did you mean 'best'"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        UploadCheckpoint(**options)


def test_checkpoints_that_are_saved_to_a_url_are_left_there(caplog: pytest.LogCaptureFixture) -> None:
    saver, hook = (
        ModelCheckpoint(dirpath="memory://there", save_top_k=-1, save_last=True),
        UploadCheckpoint("memory://backup"),
    )
    quiet(max_epochs=2, hooks=[saver, hook]).fit(Net(), batches(2))
    assert (hook.uploaded, hook.failed) == ([], [])
    assert caplog.text.count("saved to a URL") == 1
    again = UploadCheckpoint("memory://backup")
    trainer = quiet(max_epochs=3, hooks=[again])
    trainer.fit(Net(), batches(2), resume="memory://there/last")
    assert trainer.global_step == 6 and again.uploaded == []


def test_every_reason_for_a_save_can_be_chosen() -> None:
    assert UploadCheckpoint("memory://backup", reasons=SAVE_REASONS).reasons == SAVE_REASONS


def test_what_is_there_is_known_after_a_resume() -> None:
    hook = UploadCheckpoint("memory://bucket")
    upload(hook)
    again = UploadCheckpoint("memory://bucket")
    again.load_state_dict(hook.state_dict())
    assert again.uploaded == ["s2", "s4"]
