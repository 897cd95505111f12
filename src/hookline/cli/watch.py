"""`hookline watch`: a live page about a run."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from hookline.cli.codes import OK
from hookline.watch import Watch


def run(chosen: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    watch = Watch(Path(chosen.run_dir), chosen.port)
    if chosen.json:
        print(json.dumps({"url": watch.url, "run_dir": str(chosen.run_dir)}), flush=True)
    else:
        print(
            f"{chosen.run_dir} is at\n\n  {watch.url}\n\nThe address works once, for one browser. Ctrl-C "
            f"ends it.",
            flush=True,
        )
    with contextlib.suppress(KeyboardInterrupt):
        watch.serve()
    return OK
