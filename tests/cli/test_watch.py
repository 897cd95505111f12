"""`hookline watch` as a program: it prints an address, serves, and ends by Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from http.cookiejar import CookieJar

from report.reported import metrics, written


def test_it_prints_its_address_serves_and_ends_by_ctrl_c() -> None:
    written("run", metrics(1, loss=1.0))
    command = [sys.executable, "-m", "hookline", "watch", "run", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            told = json.loads(server.stdout.readline())
            browser = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(CookieJar())
            )
            with browser.open(told["url"], timeout=60) as page:
                assert b"Hookline report" in page.read()
        finally:
            server.send_signal(signal.SIGINT)
        _, complaints = server.communicate(timeout=300)
    assert server.returncode == 0 and complaints == ""
