"""Read Markdown as the site does (headings and their anchors, links, code blocks), and write cells of tables.

The anchor of a heading follows the rule that both GitHub and the site use: lower case, spaces as dashes,
other punctuation left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HEADING = re.compile(r"^(#{1,6}) +(.*?) *#* *$")
FENCE = re.compile(r"^ *(`{3,}|~{3,})(.*)$")
LINK = re.compile(r"(?<!\\)!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]*)>?(?: +\"[^\"]*\")?\)")


@dataclass(frozen=True)
class Link:
    """A link of a page: the line it is on, and its target as written."""

    line: int
    target: str


def lines_outside_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not in a fenced block."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if match and not fence:
            fence = match.group(1)
        elif match and match.group(1).startswith(fence) and not match.group(2).strip():
            fence = ""
        elif not fence:
            yield number, line


def plain(heading: str) -> str:
    """Return a heading without its markup: code, emphasis and the targets of links."""
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"(?<!\w)[*_]{1,2}(\S(?:.*?\S)?)[*_]{1,2}(?!\w)", r"\1", heading).replace("`", "")


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", plain(heading).strip().lower()).replace(" ", "-")


def headings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the level, the text and the anchor of each heading; a repeated anchor has a number."""
    seen: dict[str, int] = {}
    for _, line in lines_outside_code(text):
        if match := HEADING.match(line):
            anchor = slug(match.group(2))
            count = seen.get(anchor, 0)
            seen[anchor] = count + 1
            yield len(match.group(1)), plain(match.group(2)), f"{anchor}_{count}" if count else anchor


def heading_anchors(text: str) -> set[str]:
    """Return the anchors of a page."""
    return {anchor for _, _, anchor in headings(text)}


def links(text: str) -> Iterator[Link]:
    """Yield the links and images of a page, without those in code."""
    for number, line in lines_outside_code(text):
        for match in LINK.finditer(re.sub(r"(`+)(?:(?!\1).)*\1", lambda code: "x" * len(code.group()), line)):
            yield Link(number, match.group(1))


def python_blocks(text: str) -> Iterator[tuple[tuple[str, str] | None, str]]:
    """Yield each block of Python with the title and the anchor of its heading."""
    found = iter(list(headings(text)))
    heading: tuple[str, str] | None = None
    fence, language, block = "", "", list[str]()
    for line in text.splitlines():
        match = FENCE.match(line)
        if match and not fence:
            fence, language, block = match.group(1), match.group(2).strip(), []
        elif match and match.group(1).startswith(fence) and not match.group(2).strip():
            if language == "python":
                yield heading, "\n".join(block)
            fence = ""
        elif fence:
            block.append(line)
        elif HEADING.match(line):
            _, title, anchor = next(found)
            heading = (title, anchor)


def lines_with_heading(text: str) -> Iterator[tuple[tuple[str, str] | None, str]]:
    """Yield each line outside of code blocks with the title and the anchor of its heading."""
    found = iter(list(headings(text)))
    heading: tuple[str, str] | None = None
    for _, line in lines_outside_code(text):
        if HEADING.match(line):
            _, title, anchor = next(found)
            heading = (title, anchor)
        yield heading, line


def escaped(text: str) -> str:
    """Return text for a cell of a table, with code where the docstring has it."""
    return " ".join(text.replace("|", "\\|").split())


def sentence(text: str) -> str:
    """Return text that begins with a capital and ends with a period, outside of code."""
    text = text.strip().rstrip(";")
    if not text:
        return ""
    if text[0].islower() and not re.match(r"[a-z_]+\(|[a-z]+_", text):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?", "```")) else text + "."


def broken_links(page: Path, root: Path) -> list[str]:
    """Return a sentence for each link of a page whose file or anchor does not exist. root: the checkout."""
    problems = []
    for link in links(page.read_text()):
        where = f"{page.relative_to(root)}:{link.line}"
        if re.match(r"[a-z]+:", link.target):
            continue
        name, _, anchor = link.target.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            problems.append(f"{where}: {link.target}: there is no file {name}")
        elif anchor and target.suffix == ".md" and anchor not in heading_anchors(target.read_text()):
            problems.append(f"{where}: {link.target}: {target.name} has no heading with this anchor")
    return problems
