"""Checkpoints behind an http server with signed URLs: read with the signature, which nothing that is said holds."""

from __future__ import annotations

import functools
import http.server
import threading
import traceback
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import CheckpointError, load_weights
from hookline.checkpoint.files import read, verify, write

SECRET = "hunter2%2Fsecret"


class Signed(http.server.SimpleHTTPRequestHandler):
    """Gives files only to those who know the signature."""

    def do_GET(self) -> None:
        self.answer(super().do_GET)

    def do_HEAD(self) -> None:
        self.answer(super().do_HEAD)

    def answer(self, give: Any) -> None:
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        if asked.get("sig") == [urllib.parse.unquote(SECRET)]:
            give()
        else:
            self.send_error(403)

    def log_message(self, *given: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    write(
        {"module": {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, "counters": {"step": 3}},
        tmp_path / "run" / "step-3",
    )
    handler = functools.partial(Signed, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/run/step-3"
        server.shutdown()


def test_a_checkpoint_is_read_with_a_signature_after_its_path(address: str) -> None:
    url = f"{address}?sv=1&sig={SECRET}"
    verify(url)
    assert read(url)["counters"]["step"] == 3
    report = load_weights(torch.nn.Linear(2, 1), url)
    assert report.complete and "hunter2" not in str(report) and report.source == f"{address}?..."


@pytest.mark.parametrize("wrong", ["path", "signature", "server"])
def test_no_error_tells_the_signature_nor_do_its_causes(address: str, wrong: str) -> None:
    url = {
        "path": f"{address}/nowhere?sig={SECRET}",
        "signature": f"{address}?sig=other{SECRET}",
        "server": f"http://127.0.0.1:1/run?sig={SECRET}",
    }[wrong]
    for use in (read, verify, lambda place: load_weights(torch.nn.Linear(2, 1), place)):
        with pytest.raises(CheckpointError) as failed:
            use(url)
        shown = "".join(traceback.format_exception(failed.value))
        assert "hunter2" not in shown and "?..." in str(failed.value), shown
