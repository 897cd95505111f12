"""`hookline watch` and `hookline control`, as people and programs use them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import preloaded
import pytest
from control.asking import Counts, asked
from report.reported import metrics, written

from hookline.cli import main

PROBE = "from hookline import Hook\nclass Probe(Hook):\n    def on_step_end(self): ...\n"


def said(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["control", "run", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_shell_can_do_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    Path("probe.py").write_text(PROBE)
    answers, _ = asked(
        lambda: said(capsys),
        lambda: said(capsys, "disable", "counts"),
        lambda: said(capsys, "every", "counts", "20", "steps"),
        lambda: said(capsys, "attach", "probe.py:Probe", "--name", "mine"),
        lambda: said(capsys, "checkpoint"),
        lambda: said(capsys, "status", "--json"),
        lambda: said(capsys, "detach", "mine"),
        lambda: said(capsys, "lr", "x0.5"),
        lambda: said(capsys, "lr", "1e-3", "--group", "0", "--json"),
        lambda: said(capsys, "validate"),
        hooks=[Counts()],
    )
    status, disable, often, attach, checkpoint, told, detach, factor, rate, validate = answers
    assert (
        status[0] == 0
        and re.search(r"training: step [\d,]+, .*(epoch|batch)", status[1])
        and "counts  on" in status[1]
    )
    assert disable[0] == 0 and disable[1].startswith("disable counts: done at step ")
    assert often[1].startswith("every counts 20 steps: done") and attach[1].startswith("attach mine: done")
    assert re.fullmatch(r"checkpoint: step \d+ is saved in /.*/run/checkpoints/step-\d+\n", checkpoint[1])
    assert detach[1].startswith("detach mine: done at step ")
    assert re.fullmatch(r"lr: from 0.1 to 0.05, from step \d+ on\n", factor[1])
    assert json.loads(rate[1])["groups"] == [{"group": 0, "name": None, "before": 0.05, "lr": 0.001}]
    assert validate[0] == 1 and "no validation data: pass val= to fit" in validate[2]
    hooks = {each["name"]: each for each in json.loads(told[1])["hooks"]}
    assert (
        hooks["counts"]["enabled"] is False
        and hooks["counts"]["every"] == "every 20 steps"
        and "mine" in hooks
    )


def test_what_is_refused_or_wrong_is_told_apart_by_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    answers, _ = asked(
        lambda: said(capsys, "disable", "count"),
        lambda: said(capsys, "enabl", "counts"),
        lambda: said(capsys, "disable"),
        lambda: said(capsys, "stop", "--name", "x"),
        lambda: said(capsys, "validate", "--group", "1"),
        lambda: said(capsys, "lr"),
        lambda: said(capsys, "lr", "x0"),
        hooks=[Counts()],
    )
    assert [each[0] for each in answers] == [1, 2, 2, 2, 2, 2, 1]
    assert "--group is an option of lr; validate does not take it." in answers[4][2]
    assert "lr takes VALUE; got nothing." in answers[5][2] and "above 0" in answers[6][2]
    assert "Did you mean 'counts'?" in answers[0][2] and "Did you mean 'enable'?" in answers[1][2]
    assert "disable takes HOOK; got nothing." in answers[2][2]
    assert said(capsys, "status")[0] == 1
    for wrong in ("nan", "-1", "inf"):
        assert main(["control", "run", f"--wait={wrong}"]) == 2 and "--wait" in capsys.readouterr().err
    assert main(["control", "rum"]) == 2 and "Did you mean 'run'?" in capsys.readouterr().err


def test_a_hook_that_a_program_has_named_badly_leaves_the_table_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd, wide = Counts(), Counts()
    odd.name, wide.name = "a\nb", "x" * 5000
    answers, _ = asked(lambda: said(capsys), hooks=[odd, wide])
    lines = answers[0][1].splitlines()
    assert len(lines) == 5 and max(map(len, lines)) < 130 and lines[2].startswith("'a\\nb' ")


# ---- watch -------------------------------------------------------------------------------------------------


def test_it_prints_its_address_serves_and_ends_by_ctrl_c() -> None:
    written("run", metrics(1, loss=1.0))
    command = [sys.executable, "-m", "hookline", "watch", "run", "--json"]
    with preloaded.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
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


def test_costs_that_are_not_measured_are_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    answers, _ = asked(lambda: said(capsys), hooks=[Counts()], audit={"costs": False})
    assert re.search(r"counts +on +- +- +-", answers[0][1])
