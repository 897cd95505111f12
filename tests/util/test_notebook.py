"""HTML for notebooks: nothing in a text can become markup, and nothing is loaded."""

from __future__ import annotations

import html
import re

import pytest

from hookline.util.notebook import escape, foldable, frame, table

EVIL = "<script>alert('x')</script>\"&\n\x1b[0m\udc80"


@pytest.mark.parametrize(
    "made",
    [
        escape(EVIL),
        table((EVIL, "b"), [(EVIL, 1)]),
        foldable(EVIL, "inside"),
        frame(f"<p>{EVIL}</p></iframe>", 10),
    ],
    ids=["text", "table", "foldable", "frame"],
)
def test_texts_stay_texts(made: str) -> None:
    assert "<script" not in made
    assert made.count("</iframe>") == made.count("<iframe ")
    assert "\x1b" not in made or "srcdoc" in made
    made.encode()  # an unpaired surrogate could not be sent to a notebook
    assert not re.search(r"(src|href)=", made)
    assert "color:" not in made  # the theme's, dark or light


def test_a_table_has_its_cells_in_order() -> None:
    made = table(("metric", "value"), [("loss", 0.5), ("accuracy", 1)])
    assert re.findall(r"<t[hd] [^>]*>([^<]*)<", made) == ["metric", "value", "loss", "0.5", "accuracy", "1"]


def test_a_page_in_a_frame_is_complete_and_apart() -> None:
    page = "<!doctype html><p class=\"a\">text & 'more'</p>"
    made = frame(page, 300)
    source = re.search(r'srcdoc="([^"]*)"', made)
    assert source is not None
    assert html.unescape(source[1]) == page
    assert 'sandbox="allow-scripts"' in made  # without allow-same-origin
    assert 'height="300"' in made
