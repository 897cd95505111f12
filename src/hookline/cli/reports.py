"""`hookline report`: a run, or several, as one HTML page."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from hookline.cli.codes import OK
from hookline.report import write_report
from hookline.report.run_events import position, status
from hookline.run.state import count_noun
from hookline.util.text import printable


def run(chosen: argparse.Namespace) -> int:
    """Write the page and print its path."""
    path, runs = write_report(chosen.run_dirs, chosen.out)
    size, now = path.stat().st_size, time.time()
    if chosen.json:
        about: list[dict[str, Any]] = [
            {
                "run_dir": str(each.path),
                "status": status(each, now)[0],
                "step": at.step,
                "epochs": at.epochs,
                "records": each.records,
                "superseded": each.superseded,
                "metrics": len(each.series),
                "checkpoints": len(each.checkpoints),
            }
            for each, at in ((each, position(each)) for each in runs)
        ]
        print(json.dumps({"report": str(path), "bytes": size, "runs": about}))
        return OK
    for each in runs:
        records = count_noun(each.records, "record", "records")
        print(printable(f"{each.path}: {status(each, now)[0]}, {position(each)}, {records}"))
    print(f"wrote {path} ({size / 1e6:.1f} MB)")
    return OK
