"""Descriptors that belong to one process, and threads that are not waited for for ever."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from hookline.util.processes import close_in_children, join, wait_for_end


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_has_no_copy_of_a_private_descriptor() -> None:
    private, common = socket.socketpair()
    close_in_children(private)
    child = os.fork()
    if child == 0:
        os._exit(10 * (private.fileno() < 0) + (common.fileno() < 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert private.fileno() >= 0, "here it stays open"
    private.close()
    common.close()


def test_a_thread_that_does_not_end_is_named_with_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()
    thread = threading.Thread(target=free.wait, name="slow one", daemon=True)
    thread.start()
    assert not join(thread, 0.05, "three records are not written")
    assert (
        "'slow one' did not end within 0.05 s and is abandoned: three records are not written." in caplog.text
    )
    free.set()
    assert join(thread, 30) and wait_for_end(thread, 0)


def test_a_thread_that_ends_is_not_waited_for_longer() -> None:
    thread = threading.Thread(target=time.sleep, args=(0.01,))
    thread.start()
    began = time.monotonic()
    assert wait_for_end(thread, 1000)
    assert time.monotonic() - began < 100
