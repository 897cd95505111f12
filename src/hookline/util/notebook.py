"""HTML for the cells of a notebook. All texts are escaped; styles are inline and use the colors of the
notebook's theme, so that they fit light and dark ones. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from hookline.util.text import encodable, printable

CELL = "text-align:left;padding:0.1em 1.5em 0.1em 0;background:transparent;font-variant-numeric:tabular-nums"
FRAME = "width:100%;border:1px solid rgba(128,128,128,0.5);border-radius:4px"
NESTED = "margin:0 0 0 0.4em;padding-left:1em;border-left:1px solid rgba(128,128,128,0.5)"


def escape(text: object) -> str:
    """Return any text as HTML that shows it, also inside an attribute."""
    return html.escape(encodable(printable(text)))


def preformatted(text: str) -> str:
    """Return lines of text as they are; a long line wraps."""
    lines = "\n".join(map(escape, text.splitlines()))
    return f'<pre style="margin:0;background:transparent;white-space:pre-wrap">{lines}</pre>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of texts, which scrolls if it is long."""
    head = "".join(f'<th style="{CELL}">{escape(each)}</th>' for each in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{escape(each)}</td>' for each in row) + "</tr>" for row in rows
    )
    return (
        '<div style="max-height:30em;overflow:auto"><table style="border-collapse:collapse">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def foldable(title: str, content: str, is_open: bool = True) -> str:
    """Return HTML below a title, which a click folds and unfolds."""
    tag = "<details open>" if is_open else "<details>"
    return f'{tag}<summary>{escape(title)}</summary><div style="{NESTED}">{content}</div></details>'


def show_folded(title: str, content: str, text: str) -> None:
    """Show HTML folded below a title in the current cell. text: for frontends that show plain text only."""
    from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

    display({"text/plain": text, "text/html": foldable(title, content, is_open=False)}, raw=True)


def frame(page: str, height: int) -> str:
    """Return a complete page in a frame of its own: its styles and scripts cannot reach the notebook."""
    source = html.escape(encodable(page))
    return f'<iframe sandbox="allow-scripts" height="{height:d}" style="{FRAME}" srcdoc="{source}"></iframe>'
