"""The page: complete in itself, nothing of a run becomes markup, and its size has a limit."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.reported import MARKUP, data_in, metrics, page_of, whole_run, written

from hookline.report import write_report
from hookline.util.errors import OptionError


class Elements(HTMLParser):
    """The elements of a page as a browser finds them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "action", "data")]


def test_nothing_of_a_run_becomes_markup() -> None:
    plain, hostile = page_of(written("plain", metrics(1, loss=1.0))), page_of(whole_run())
    assert MARKUP in json.dumps(data_in(hostile))  # it is there, as text
    assert Elements(hostile).tags == Elements(plain).tags
    assert "window.hacked" not in re.sub(
        r'<script type="application/json".*?</script>', "", hostile, flags=re.DOTALL
    )


def test_the_name_of_a_directory_is_no_markup_and_may_be_no_unicode() -> None:
    path = written("<b>run&amp;\udcff", metrics(1, loss=1.0))
    target, _ = write_report([path], "out.html")
    page = target.read_text(encoding="utf-8")
    assert "<title>&lt;b&gt;run&amp;amp;" in page and "b" not in Elements(page).tags


def test_the_page_asks_for_nothing_and_runs_only_its_own_script() -> None:
    page = page_of(whole_run())
    assert Elements(page).links == ["#content"]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none'; img-src data:;")
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, found in (("script", script), ("style", style)):
        assert found
        digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]


def test_a_report_is_written_whole_and_never_over_something_else() -> None:
    path = written("run", metrics(1, loss=1.0))
    assert write_report([path])[0] == path / "report.html"
    assert write_report([path, written("other", metrics(1, loss=1.0))])[0] == Path("report.html")
    with pytest.raises(OptionError, match=r"must end with \.html"):
        write_report([path], path / "log.jsonl")
    with pytest.raises(OptionError, match="could not be written"):
        write_report([path], "nowhere/page.html")
    with pytest.raises(OptionError, match="named twice"):
        write_report([path, "run/../run"])
    assert not [each for each in path.iterdir() if each.name.startswith(".")]
