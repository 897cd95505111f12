"""Upload finished checkpoints in the background."""

from __future__ import annotations

import collections
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from hookline.engine.checks import Count, Several, Timeout, checked_parameters, refused
from hookline.engine.hook import Hook
from hookline.util.errors import HookError, OptionError
from hookline.util.snapshot import UPLOADS, remove_if_empty, take_snapshot
from hookline.util.text import printable, redact
from hookline.util.urls import (
    MANIFEST,
    check_url,
    is_url,
    open_url,
    put_folder,
    remove_remote_folder,
    url_below,
)

log = logging.getLogger("hookline")

SAVE_REASONS = ("interval", "best", "last", "signal", "exception", "manual")


class UploadCheckpoint(Hook):
    """Uploads each durable checkpoint: its files first, its manifest last, so an upload with a manifest is
    complete.

    A thread uploads through fsspec (`s3://`, `gs://`, `file://`, ...) and does not stop the training. A
    failed upload is tried again, then reported. The end of the run waits for uploads, up to `timeout`. A
    checkpoint that is saved to a URL is not uploaded. Other files in a checkpoint's directory are uploaded
    with it.
    """

    tier = "builtin"
    observes = True
    ranks = "zero"

    @checked_parameters
    def __init__(
        self,
        url: str,
        keep: Annotated[int, Count(1)] | None = None,
        reasons: Annotated[tuple[str, ...], Several(SAVE_REASONS)] | None = None,
        max_waiting: Annotated[int, Count(1)] = 2,
        attempts: Annotated[int, Count(1)] = 3,
        timeout: Annotated[float, Timeout()] = 600.0,
        storage_options: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Choose the target and the checkpoints.

        url: the target folder. keep: how many of the newest to keep there; None: all.
        reasons: only checkpoints saved for these, such as ('best', 'last'); None: all.
        max_waiting: length of the queue; when it is full, the oldest one is dropped with a warning.
        attempts: tries per upload. timeout: seconds to wait for uploads at the end of the run.
        storage_options: options of the file system, passed to fsspec.
        """
        super().__init__(name)
        if not isinstance(url, str) or not is_url(url):
            raise refused(
                "UploadCheckpoint: url", url, "a URL, such as 's3://bucket/folder' or 'file:///backup'"
            )
        check_url(url, "UploadCheckpoint: url")
        if not isinstance(storage_options or {}, Mapping) or not all(
            isinstance(name, str) for name in storage_options or ()
        ):
            raise OptionError(
                "UploadCheckpoint: storage_options (not shown, it may hold secrets) must be a mapping of "
                "names to values.",
                option="storage_options",
                allowed="a mapping of names to values",
            )
        self.keep, self.reasons, self.max_waiting, self.attempts, self.timeout = (
            keep,
            reasons,
            max_waiting,
            attempts,
            timeout,
        )
        self.pause = 1.0
        """Seconds before the second attempt, doubled before each further one."""
        self._url, self._storage_options = url, dict(storage_options or {})
        self._fs: Any = None
        self._root = ""
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[Path, str]] = collections.deque()
        self._uploading = ""
        self._closing = False
        self._is_in_run = False
        self._snapshots: Path | None = None
        self.uploaded: list[str] = []
        """The names of uploaded checkpoints, the oldest first."""
        self.failed: list[str] = []
        """The names of checkpoints that were not uploaded in this run."""
        self._serial = 0
        self._has_warned = False

    def setup(self, stage: str) -> None:
        self._is_in_run = True
        if stage == "fit":  # a new run; a resumed one gets its state right after this
            self.uploaded, self.failed, self._has_warned = [], [], False
        try:
            self._fs, self._root = open_url(self._url, self._storage_options)
        except ImportError as error:
            raise HookError(
                f"UploadCheckpoint: {self._url.partition('://')[0]}:// cannot be used: {self._clean(error)}"
            ) from None
        except OptionError:
            raise
        except (ValueError, TypeError) as error:  # raised by the file system for storage_options
            raise OptionError(
                f"UploadCheckpoint: url or storage_options are not understood: {self._clean(error)}"
            ) from None

    def on_checkpoint_load(self, path: Path | str) -> None:
        """Record the upload of the loaded checkpoint, which was written before its own upload."""
        if isinstance(path, str):  # loaded from a URL, not from an upload of this hook
            return
        try:
            if path.name not in self.uploaded and self._fs.exists(
                url_below(self._root, f"{path.name}/{MANIFEST}")
            ):
                self.uploaded.append(path.name)
        except Exception as error:
            log.warning(
                "UploadCheckpoint: whether %s was uploaded is unknown: %s.", path.name, self._clean(error)
            )

    def on_checkpoint_save(self, trainer: Any, path: Path | str, reason: str) -> None:
        if self.reasons is not None and reason not in self.reasons:
            return
        if isinstance(path, str):
            if not self._has_warned:
                log.warning("UploadCheckpoint: a checkpoint that is saved to a URL is not uploaded again.")
            self._has_warned = True
            return
        self._serial += 1
        self._snapshots = Path(trainer.run_dir) / UPLOADS
        snapshot = self._snapshots / f"{self._serial}-{os.getpid()}-{path.name}"
        try:
            left_out = take_snapshot(path, snapshot)
        except OSError as error:
            self._give_up(path.name, error)
            return
        if left_out:
            log.warning(
                "UploadCheckpoint: %s is uploaded without %s: only plain files and folders can be copied.",
                path.name,
                ", ".join(map(printable, left_out)),
            )
        with self._changed:
            self._waiting.append((snapshot, path.name))
            dropped = self._waiting.popleft() if len(self._waiting) > self.max_waiting else None
            if self._thread is None:
                self._closing = False
                self._thread = threading.Thread(target=self._work, name="hookline upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if dropped is not None:
            shutil.rmtree(dropped[0], ignore_errors=True)
            self._give_up(dropped[1], f"{self.max_waiting} newer ones are waiting")
        if not self._is_in_run:
            self._finish()  # saved after the run: no teardown follows

    def teardown(self) -> None:
        self._is_in_run = False
        self._finish()

    def _finish(self) -> None:
        """Wait for the queued uploads."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        thread.join(self.timeout)
        if thread.is_alive():
            with self._changed:
                left = [name for _, name in self._waiting]
                self._waiting.clear()
            log.warning(
                "UploadCheckpoint: after %g s the upload of %s still hangs and is given up%s.",
                self.timeout,
                self._uploading,
                f", with {', '.join(left)} behind it" if left else "",
            )
            self.failed += [self._uploading, *left]
        self._thread = None
        if self._snapshots is not None:
            remove_if_empty(self._snapshots)
        if self.failed:
            log.warning("UploadCheckpoint: not uploaded in this run: %s.", ", ".join(self.failed))

    # ---- in the thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                snapshot, name = self._waiting.popleft()
                self._uploading = name
            try:
                self._try(snapshot, name)
            except Exception as error:
                self._give_up(name, error)
            finally:
                shutil.rmtree(snapshot, ignore_errors=True)

    def _try(self, snapshot: Path, name: str) -> None:
        for attempt in range(1, self.attempts + 1):
            try:
                put_folder(self._fs, snapshot, url_below(self._root, name))
                break
            except Exception as error:
                if attempt == self.attempts:
                    raise
                log.warning(
                    "UploadCheckpoint: %s failed, try %d of %d: %s.",
                    name,
                    attempt,
                    self.attempts,
                    self._clean(error),
                )
                time.sleep(self.pause * 2 ** (attempt - 1))
        self.uploaded = [*(each for each in self.uploaded if each != name), name]
        while self.keep is not None and len(self.uploaded) > self.keep:
            remove_remote_folder(self._fs, url_below(self._root, self.uploaded[0]))
            self.uploaded = self.uploaded[1:]

    # ---- messages ------------------------------------------------------------------------------------------

    def _give_up(self, name: str, why: Any) -> None:
        self.failed.append(name)
        log.warning("UploadCheckpoint: %s is not uploaded: %s.", name, self._clean(why))

    def _clean(self, why: Any) -> str:
        """Return an error's text without the secrets of the URL."""
        return redact(f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else why, self._url)

    def state_dict(self) -> dict[str, Any]:
        return {"uploaded": list(self.uploaded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.uploaded:  # a rollback does not undo uploads
            return
        # accept plain names only, because the oldest uploads are removed later
        self.uploaded = [
            name for name in state["uploaded"] if isinstance(name, str) and Path(name).name == name
        ]
