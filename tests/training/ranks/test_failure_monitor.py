"""LivenessRing: a rank that dies is missed by the one before it; one that leaves in good order, or is only busy, is not."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from hookline.training.ranks.failure_monitor import LivenessRing, keep_alive, own_address


def two() -> tuple[LivenessRing, LivenessRing]:
    """The ring of a job of two ranks, both in this process."""
    addresses, all_there, made = ["", ""], threading.Barrier(2), {}

    def join(rank: int) -> None:
        def gather(address: str) -> list[str]:
            addresses[rank] = address
            all_there.wait(60)
            return addresses

        made[rank] = LivenessRing(rank, gather)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    for ring in made.values():
        assert ring.lost(0.2) is False  # lets the caller in
    return made[0], made[1]


def test_a_rank_that_closes_without_a_word_is_lost() -> None:
    zero, one = two()
    for each in one._incoming:  # what the system does when a process is killed
        each.close()
    assert zero.lost(5) is True
    assert zero.lost(0.01) is False  # told once
    for ring in (zero, one):
        ring.leave()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_rank_that_dies_is_lost_although_a_worker_of_its_lives_on() -> None:
    zero, one = two()
    worker = os.fork()
    if worker == 0:  # holds a copy of every descriptor that its parent had
        time.sleep(600)
        os._exit(0)
    try:
        for each in one._incoming:
            each.close()
        assert zero.lost(5) is True
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        for ring in (zero, one):
            ring.leave()


def test_a_rank_that_says_goodbye_is_not_lost() -> None:
    zero, one = two()
    one.leave()
    assert zero.lost(1) is False
    zero.leave()


def test_waiting_can_be_ended() -> None:
    zero, one = two()
    threading.Timer(0.05, zero.wake).start()
    began = time.monotonic()
    assert zero.lost(100) is False
    assert time.monotonic() - began < 90
    for ring in (zero, one):
        ring.leave()


def test_a_rank_that_cannot_be_reached_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    ring = LivenessRing(0, lambda own: [own, f"{port} 127.0.0.1"])
    assert "Rank 1 cannot be watched from here" in caplog.text
    assert ring.lost(0.01) is False
    ring.leave()


def test_a_rank_that_cannot_listen_is_a_warning_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    ring = LivenessRing(1, lambda own: ["", own])  # nor can the other one
    assert caplog.text.count("Rank 1 cannot be watched (") == 1 == len(caplog.records)
    assert ring.lost(0.01) is False
    ring.leave()


def test_a_rank_that_dies_before_it_has_an_address_is_not_waited_for() -> None:
    def gather(own: str) -> list[str]:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        LivenessRing(0, gather)


def test_the_system_asks_for_signs_of_life() -> None:
    with socket.socket() as line:
        keep_alive(line)
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            waits = [
                line.getsockopt(socket.IPPROTO_TCP, getattr(socket, each))
                for each in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            ]
            assert waits[0] + waits[1] * waits[2] <= 5


def test_the_own_address_is_the_one_that_leads_to_the_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert own_address() == "127.0.0.1"
