"""Run the examples as their READMEs say, and print a line for each: name, seconds, passed or failed.

Run it through `python3 dev.py examples [NAME ...]`. The commands are the first `sh` block of
`examples/NAME/README.md`; they run in a temporary directory with a copy of `examples/`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def names(folder: Path = EXAMPLES) -> list[str]:
    """Return the names of all examples."""
    return sorted(each.parent.name for each in folder.glob("*/README.md"))


def commands(readme: Path) -> list[list[str]]:
    """Return the words of the commands in the first `sh` block of a README."""
    block = re.search(r"^```sh\n(.*?)^```", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if block is None:
        raise SystemExit(f"{readme} has no block of commands (```sh).")
    return [words for line in block[1].splitlines() if (words := shlex.split(line, comments=True))]


def run(name: str, workplace: Path, log: Path) -> bool:
    """Run the commands of an example, with the programs of this environment; return whether all passed."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    # threads that wait actively would make small steps slow on a machine that does something else as well
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PATH": path}
    with log.open("w", encoding="utf-8") as output:
        for words in commands(workplace / "examples" / name / "README.md"):
            print("$", shlex.join(words), file=output, flush=True)
            ended = subprocess.run(
                words, cwd=workplace, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
            )
            if ended.returncode:
                return False
    return True


def main(arguments: Sequence[str]) -> int:
    """Run the examples that are named, or all."""
    known = names()
    for name in arguments:
        if name not in known:
            print(f"There is no example {name!r}. Examples: {', '.join(known)}.", file=sys.stderr)
            return 2
    logs, failed = Path(tempfile.mkdtemp(prefix="hookline-examples-")), False
    with tempfile.TemporaryDirectory() as folder:
        workplace = Path(folder)
        shutil.copytree(
            EXAMPLES, workplace / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs")
        )
        for name in arguments or known:
            log, began = logs / f"{name}.txt", time.monotonic()
            passed = run(name, workplace, log)
            failed |= not passed
            print(
                f"{'passed' if passed else 'FAILED'}  {name:<24}{time.monotonic() - began:5.0f} s   {log}",
                flush=True,
            )
            if not passed:
                print(log.read_text(encoding="utf-8", errors="replace"), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
