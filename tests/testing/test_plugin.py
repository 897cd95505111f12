"""The pytest fixtures come with the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TEST = """
from hookline import Hook

class Count(Hook):
    def __init__(self):
        self.n = 0

    def on_step_end(self, step):
        self.n = step

def test_it(hook_player, fire_event):
    hook = Count()
    fire_event(hook, "step_end", step=5)
    assert hook.n == 5
    hook_player(hook, max_steps=3)
    assert hook.n == 3
"""


def test_fixtures_are_there_without_a_line_of_set_up(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_program_that_only_has_the_plugin_installed_does_not_import_torch() -> None:
    code = "import sys, hookline.testing.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hookline.testing" in done.stdout.split() and "torch" not in done.stdout.split()
