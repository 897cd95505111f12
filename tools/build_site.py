"""Build the documentation site with Zensical, or serve it on this machine.

`python tools/build_site.py` writes site/. With `--serve` it also serves the site on 127.0.0.1:8000, and
builds it again when a page changes. Broken links and anchors are errors. Nothing is loaded from the network,
neither by the build nor by the pages.

The pages are copied to build/site first: with those outside of docs/, and written as Python-Markdown reads
them. The page of an example gets the code of its program. The sources stay as GitHub shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_links import FENCE, LINK, headings, slug

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
    "faults/README.md": "faults.md",
    "README.md": "index.md",
}
"""Pages outside of docs/, and their places on the site. That of the README is the page in docs/."""
COPIED = (".png", ".svg", ".gif", ".ipynb")
"""Files of examples that the site has as they are: pictures, and notebooks to download."""
LINK_OR_CODE = re.compile(rf"{LINK.pattern}|(?<!`)(`+)(?!`).*?(?<!`)\2(?!`)")
"""A link, or a span of code, in which brackets are not a link."""
IN_PAGES = (".py", ".toml", ".ipynb")
"""Files of an example that its page shows."""
ITEM = re.compile(r"^( *)([-*]|\d+\.) ")


def sources() -> dict[Path, Path]:
    """Return the place on the site of every file that is part of it."""
    found = {each: each.relative_to(DOCS) for each in sorted(DOCS.rglob("*")) if each.is_file()}
    for name, place in OUTSIDE.items():
        if (ROOT / name).exists() and name != "README.md":
            found[ROOT / name] = Path(place)
    for readme in sorted(ROOT.glob("examples/*/README.md")):
        found[readme] = Path("examples", f"{readme.parent.name}.md")
        for file in (each for each in readme.parent.rglob("*") if each.suffix in COPIED):
            found[file] = Path("examples", readme.parent.name, file.relative_to(readme.parent))
    return found


def with_programs(text: str, readme: Path) -> str:
    """Return the page of an example with the files of its program below it, as code."""
    kinds = {".py": "py", ".toml": "toml"}
    files = [each for each in sorted(readme.parent.iterdir()) if each.suffix in kinds]
    parts = [text.rstrip("\n"), how_to_run(text, readme)]
    for file in files:
        source = file.read_text().rstrip("\n")
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`{3,}", source)), 3)
        parts.append(f"## {file.name}\n\n{fence}{kinds[file.suffix]}\n{source}\n{fence}")
    for notebook in sorted(readme.parent.glob("*.ipynb")):
        parts.append(f"## {notebook.name}")
        for cell in json.loads(notebook.read_text())["cells"]:
            source = "".join(cell["source"])
            parts.append(f"```py\n{source}\n```" if cell["cell_type"] == "code" else below(source))
    return "\n\n".join(parts) + "\n"


def how_to_run(text: str, readme: Path) -> str:
    """Return how to run an example without a checkout: the commands of its page, for files in one folder."""
    names = [f"`{each.name}`" for each in sorted(readme.parent.iterdir()) if each.suffix in IN_PAGES]
    commands = re.search(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert commands is not None, f"{readme} has no command"
    here = commands.group(1).replace(f"examples/{readme.parent.name}/", "")
    files = "the file below as" if len(names) == 1 else "the files below in one folder as"
    return (
        f"**Without a checkout.** The package has no examples: save {files} {' and '.join(names)}, and run "
        f"there:\n\n```sh\n{here}```"
    )


def below(text: str) -> str:
    """Return a text of Markdown whose headings are two levels lower."""
    return re.sub(r"^#", "###", text, flags=re.MULTILINE)


def for_site(text: str, source: Path, places: dict[Path, Path]) -> str:
    """Return a page as Python-Markdown needs it.

    Links point to the places on the site; a link to a file that is not part of it becomes its text. A list
    has a blank line before it, and its inner lists are indented by four. A pipe in the code of a table is
    not escaped.
    """
    out: list[str] = []
    fence, levels = "", list[int]()
    here = places[source]
    for line in text.splitlines():
        match = FENCE.match(line)
        if match and not fence:
            fence = match.group(1)
        elif match and match.group(1).startswith(fence) and not match.group(2).strip():
            fence = ""
            out.append(line)
            continue
        if fence:
            out.append(line)
            continue
        line = LINK_OR_CODE.sub(
            lambda found: found.group() if found.group(1) is None else relinked(found, source, here, places),
            line,
        )
        item = ITEM.match(line)
        if item:
            indent = len(item.group(1))
            if not levels and out and out[-1].strip() and not out[-1].startswith(" "):
                if item.group(2) not in ("-", "*", "1."):  # a number that begins a line of a paragraph
                    out.append(line)
                    continue
                out.append("")
            while levels and levels[-1] > indent:
                levels.pop()
            if not levels or levels[-1] < indent:
                levels.append(indent)
            line = " " * 4 * (len(levels) - 1) + line.lstrip()
        elif line.strip() and not line.startswith(" "):
            levels = [] if not out or not out[-1].strip() else levels
        elif line.startswith(" ") and levels:
            line = " " * 4 * (len(levels) - 1) + "  " + line.lstrip()
        if line.startswith("|"):
            line = re.sub(r"`[^`]*`", lambda code: code.group().replace("\\|", "|"), line)
        out.append(line)
    return "\n".join(out) + "\n"


def relinked(link: re.Match[str], source: Path, here: Path, places: dict[Path, Path]) -> str:
    """Return a link with its target's place on the site."""
    target = link.group(1)
    if re.match(r"[a-z]+:|#|$", target):
        return link.group()
    name, mark, anchor = target.partition("#")
    path = (source.parent / name).resolve()
    readme = path.parent / "README.md"
    if path in places:
        place = places[path]
    elif path.suffix in IN_PAGES and path.parent.parent == ROOT / "examples" and readme in places:
        place, mark, anchor = places[readme], "#", slug(path.name)  # the page of the example has the file
    elif path == ROOT / "README.md":
        place = Path("index.md")
    else:
        return re.sub(r"^!?\[(.*)\]\(.*$", r"\1", link.group())
    shown = os.path.relpath(place, here.parent).replace(os.sep, "/")
    before = link.start(1) - link.start()
    return link.group()[:before] + shown + mark + anchor + link.group()[before + len(target) :]


def stage(folder: Path) -> None:
    """Write what Zensical builds from: the configuration and all pages. Unchanged files keep their times."""
    places = sources()
    wanted = {folder / "zensical.toml": (ROOT / "zensical.toml").read_bytes()}
    for source, place in places.items():
        content = source.read_bytes()
        if source.suffix == ".md":
            text = content.decode()
            if source.parent.parent == ROOT / "examples":
                text = with_programs(text, source)
            content = for_site(text, source, places).encode()
        wanted[folder / "docs" / place] = content
    if (folder / "docs").exists():
        for old in [each for each in (folder / "docs").rglob("*") if each.is_file() and each not in wanted]:
            old.unlink()
    for path, content in wanted.items():
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def nav_pages(nav: list[Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Yield the top section and the path of every page in the navigation."""
    for item in nav:
        if isinstance(item, str):
            yield section, item
            continue
        for title, below in item.items():
            if isinstance(below, str):
                yield section or title, below
            else:
                yield from nav_pages(below, section or title)


def navigation() -> list[tuple[str, str]]:
    """Return the top section and the path of every page."""
    return list(nav_pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))


def summary(text: str) -> str:
    """Return the first sentence of a page."""
    body = re.sub(r"<!--.*?-->|^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", body):
        if paragraph.strip() and not re.match(r"[#|!<\-]", paragraph.strip()):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=\.) ", plain)[0].rstrip(":")
    return ""


def write_for_models(folder: Path) -> None:
    """Write llms.txt, a list of all pages with a sentence each, and llms-full.txt, their whole text.

    The pages are beside their HTML as Markdown.
    """
    site, last = folder / "site", ""
    listing = ["# Hookline", "", f"> {project()['site_description']}"]
    whole = []
    for section, name in navigation():
        text = (folder / "docs" / name).read_text()
        title = next((heading for _, heading, _ in headings(text)), name)
        if section != last:
            listing += ["", f"## {section}", ""]
            last = section
        about = summary(text)
        listing.append(f"- [{title}]({name})" + (f": {about}" if about else ""))
        whole.append(f"<!-- {name} -->\n{text}")
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (site / "llms.txt").write_text("\n".join(listing) + "\n")
    (site / "llms-full.txt").write_text("\n\n".join(whole))


def project() -> dict[str, Any]:
    """Return the settings of the site."""
    return dict(tomllib.loads((ROOT / "zensical.toml").read_text())["project"])


def build(folder: Path) -> int:
    """Build the site in folder/site; return the exit code of Zensical."""
    stage(folder)
    shutil.rmtree(folder / "site", ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    output = done.stdout + done.stderr.partition("Traceback (most recent call last)")[0]
    output = re.sub(r"\x1b\[[0-9;]*m", "", output)  # colours
    print(output, end="", flush=True)
    if done.returncode == 0:
        write_for_models(folder)
    elif "issue" not in output:  # not a broken link: show what failed
        print(done.stderr, file=sys.stderr)
    return done.returncode


def serve(folder: Path, port: int) -> int:
    """Serve the site on this machine only; copy changed pages every second."""
    ended = threading.Event()

    def copy_changes() -> None:
        while not ended.wait(1):
            try:
                stage(folder)
            except OSError as error:  # an editor replaces the file at this moment
                print(error, file=sys.stderr)

    threading.Thread(target=copy_changes, daemon=True).start()
    command = [sys.executable, "-m", "zensical", "serve", "--dev-addr", f"127.0.0.1:{port}"]
    try:
        return subprocess.run(command, cwd=folder, check=False).returncode
    except KeyboardInterrupt:
        return 0
    finally:
        ended.set()


def main() -> int:
    """Build the site into site/, and serve it if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="serve the site on 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="the port of --serve")
    chosen = parser.parse_args()
    folder = ROOT / "build" / "site"
    failed = build(folder)
    if not failed:
        shutil.rmtree(ROOT / "site", ignore_errors=True)
        shutil.copytree(folder / "site", ROOT / "site")
        print(f"wrote {ROOT / 'site' / 'index.html'}")
    return serve(folder, chosen.port) if chosen.serve else failed


if __name__ == "__main__":
    sys.exit(main())
