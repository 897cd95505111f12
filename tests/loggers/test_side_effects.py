"""Comet and ClearML do nothing to the process, the home directory and the network but what was asked for."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from pathlib import Path

import preloaded
import pytest

FONTS = os.environ.get("MPLCONFIGDIR") or str(Path.home() / ".cache" / "matplotlib")
"""Matplotlib's list of fonts, which takes seconds to make in a new home directory."""

CODE = """
    import argparse, builtins, importlib, os, signal, sys, threading
    import click, jsonargparse, numpy, torch
    from pathlib import Path
    from hookline.loggers import ClearML, Comet, Loggers

    seen, own = [], os.path.realpath("mine")

    def watch(event, given):
        if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.fork", "os.posix_spawn"):
            seen.append((event, str(given)))
        elif event == "open" and isinstance(given[1], str) and set(given[1]) & set("wax+"):
            path = os.path.realpath(str(given[0]))
            if not path.startswith((own, "/dev/", sys.prefix)) and "__pycache__" not in path:
                seen.append((event, path))

    def state():
        functions = [
            (name, each)
            for owner in (argparse.ArgumentParser, click.Command, click.Context, jsonargparse.ArgumentParser,
                          importlib.import_module("jsonargparse._typehints"), builtins, torch.nn.Module,
                          torch.optim.SGD, torch.Tensor)
            for name, each in vars(owner).items()
        ]
        functions += [sys.excepthook, threading.excepthook, os.fork, os._exit, torch.save, torch.load, sys.stdout]
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        finders = [type(each).__name__ for each in sys.meta_path if "Six" not in type(each).__name__]
        seeds = torch.get_rng_state().tolist(), str(numpy.random.get_state())
        return [*functions, *signals, finders, dict(os.environ), sys.argv, seeds]

    before = state()
    sys.addaudithook(watch)
    for logger in (Comet(mode="offline"), ClearML(mode="offline")):
        together = Loggers([logger])
        together.open(lambda: Path("mine"))
        together.log_metrics({"a": 1.0}, 1, 0)
        together.add_image("image", torch.zeros(3, 4, 4), 1)
        together.log_artifact("file.txt", "file")
        together.close()
        assert logger.package in sys.modules
        after = state()
        assert before == after, [pair for pair in zip(before, after) if pair[0] != pair[1]]
        assert seen == [], seen
    alive = [each.name for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    assert alive == [], alive
    print("done", len(list(Path("mine").rglob("*.zip"))))
"""


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("comet_ml", "clearml")),
    reason="needs the packages comet_ml and clearml",
)
def test_a_process_with_comet_and_clearml_is_as_it_was(tmp_path: Path) -> None:
    """In a process of its own, because what an import patches stays patched."""
    for name in ("mine", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "file.txt").write_text("text")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("COMET_", "CLEARML_", "TRAINS_"))
    }
    ended = preloaded.run(
        [sys.executable, "-c", textwrap.dedent(CODE)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**kept, "HOME": str(tmp_path / "home"), "MPLCONFIGDIR": FONTS},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["done 2"] and ended.stderr == ""
    assert list((tmp_path / "home").rglob("*")) == []
