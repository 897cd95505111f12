"""The report page: one file with its styles, scripts and data inside. It loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hookline.loggers.jsonl import jsonable
from hookline.report.content import names, page_data
from hookline.report.reader import RunData, read_run
from hookline.util.errors import OptionError

PARTS = Path(__file__).parent / "parts"
STYLES = ("uplot.min.css", "page.css")
SCRIPTS = ("uplot.min.js", "building.js", "updating.js", "charts.js", "heat.js", "tables.js", "page.js")
"""In this order, as one script; uPlot is third-party code, see uplot.LICENSE."""
LIVE_SCRIPTS = (*SCRIPTS[:-1], "live.js", SCRIPTS[-1])
"""The scripts of a served page, which receives updates from its server."""


def write_report(run_dirs: Sequence[Path | str], out: Path | str | None = None) -> tuple[Path, list[RunData]]:
    """Write the page about these runs, by default `report.html` in the run's directory, or here for several
    runs.
    """
    paths = [Path(each) for each in run_dirs]
    if not paths:
        raise OptionError("A report needs the directory of a run.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise OptionError(f"A run is named twice: {', '.join(str(path) for path in paths)}.")
    target = Path(out) if out is not None else (paths[0] if len(paths) == 1 else Path()) / "report.html"
    if target.suffix.lower() not in (".html", ".htm"):  # a typing error must not overwrite a log
        raise OptionError(f"--out {target} must end with .html.")
    runs = [read_run(path) for path in paths]
    _write(target, render(runs))
    return target, runs


def render(runs: list[RunData]) -> str:
    """Return the text of a self-contained page."""
    return fill(embed(page_data(runs)), names(runs), SCRIPTS)


def fill(data: str, titles: list[str], scripts: tuple[str, ...], more_policy: str = "") -> str:
    """Return a page that shows this data, which comes from `embed`."""
    style, script = _joined(STYLES), _joined(scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        f"base-uri 'none'; form-action 'none'{more_policy}"
    )
    title = " · ".join(titles[:3]) + (" …" if len(titles) > 3 else "")
    filled = {"policy": policy, "title": html.escape(title), "style": style, "script": script, "data": data}
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    # the pieces at odd indices are names of fields; they are filled in once, so data cannot name a field
    pieces = text.split("%%")
    return "".join(filled[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def embed(data: Any) -> str:
    """Return JSON for a script element: nothing in it can end the element or start markup."""
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:  # NaN, in a log that another program wrote
        text = json.dumps(jsonable(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _joined(parts: tuple[str, ...]) -> str:
    return "\n".join((PARTS / name).read_text(encoding="utf-8").strip() for name in parts)


def _hash(text: str) -> str:
    """Return the hash by which a browser recognises the one script or style that may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _write(target: Path, text: str) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        # "replace", because file names may not be valid Unicode
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OptionError(f"{target} could not be written: {error.strerror or error}") from error
