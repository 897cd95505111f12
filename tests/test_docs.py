"""The documentation: links, anchors, the navigation of the site, the site itself."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("faults/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def loaded(name: str) -> ModuleType:
    """A module of tools/, which imports its neighbours by name."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec = importlib.util.spec_from_file_location(f"hookline_tools_{name}", ROOT / "tools" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "tools"))


markdown = loaded("markdown_links")
site = loaded("build_site")


def test_no_link_and_no_anchor_is_broken() -> None:
    problems = [problem for page in PAGES for problem in markdown.broken_links(page, ROOT)]
    assert not problems, "\n".join(problems)
    assert sum(len(list(markdown.links(page.read_text()))) for page in PAGES) > 500  # it reads links


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# Title\n\n## W&B, `code` and *more*\n\n```\n## not a heading\n```\n")
    page.write_text(
        "[a](other.md#wb-code-and-more) [b](other.md#not-a-heading) [c](gone.md) `[d](gone.md)`\n"
        "```\n[e](gone.md)\n```\n[f](#page) ![g](gone.png) [h](https://example.org/gone)\n"
    )
    assert markdown.broken_links(page, tmp_path) == [
        "page.md:1: other.md#not-a-heading: other.md has no heading with this anchor",
        "page.md:1: gone.md: there is no file gone.md",
        "page.md:5: #page: page.md has no heading with this anchor",
        "page.md:5: gone.png: there is no file gone.png",
    ]


def test_the_anchors_are_those_of_the_site() -> None:
    """The rule of tools/markdown_links.py is that of the slugs that zensical.toml names."""
    slugs = pytest.importorskip("pymdownx.slugs")
    slugify = slugs.slugify(case="lower")
    for page in PAGES:
        for _, title, anchor in markdown.headings(page.read_text()):
            assert re.sub(r"_\d+$", "", anchor) == slugify(title, "-")


def test_every_page_is_in_the_navigation_and_every_entry_exists() -> None:
    entries = [name for _, name in site.navigation()]
    places = {str(place) for place in site.sources().values() if place.suffix == ".md"}
    assert len(entries) == len(set(entries)), "a page is in `nav` of zensical.toml twice"
    missing, unknown = sorted(places - set(entries)), sorted(set(entries) - places)
    assert not missing, f"add these pages to `nav` in zensical.toml: {missing}"
    assert not unknown, f"`nav` of zensical.toml names pages that do not exist: {unknown}"


def test_every_recipe_is_in_the_list_of_the_cookbook() -> None:
    listed = {
        link.target
        for link in markdown.links((ROOT / "docs/cookbook/index.md").read_text())
        if "#" in link.target
    }
    recipes = {
        f"{page.name}#{anchor}"
        for page in ROOT.glob("docs/cookbook/*.md")
        if page.name != "index.md"
        for level, _, anchor in markdown.headings(page.read_text())
        if level == 2
    }
    assert listed == recipes and len(recipes) >= 25


@pytest.mark.parametrize("page", [name for name in NAMES if "cookbook/" in name and "index" not in name])
def test_a_recipe_is_one_short_program_that_runs_by_itself(page: str) -> None:
    text = (ROOT / page).read_text()
    blocks = list(markdown.python_blocks(text))
    assert len(blocks) == sum(level == 2 for level, _, _ in markdown.headings(text))
    for heading, code in blocks:
        assert 6 <= len(code.splitlines()) <= 36, heading
        assert "import" in code.splitlines()[0], f"{heading}: begins with its imports"


def test_the_site_has_pages_as_its_markdown_reads_them(tmp_path: Path) -> None:
    places = {ROOT / "docs/a.md": Path("a.md"), ROOT / "faults/README.md": Path("faults.md")}
    text = (
        "in\n60. Text:\n- one\n  more\n  - two\n- three\n\n| `a \\| b` |\n|---|\n\n"
        "[f](../faults/README.md#x) [s](../src/gone.py) [r](../README.md)\n"
        "`b[0](x)` [`f`](../faults/README.md)\n"
    )
    assert site.for_site(text, ROOT / "docs/a.md", places) == (
        "in\n60. Text:\n\n- one\n  more\n    - two\n- three\n\n| `a | b` |\n|---|\n\n[f](faults.md#x) s [r](index.md)\n"
        "`b[0](x)` [`f`](faults.md)\n"
    )


@pytest.mark.parametrize("folder", sorted(ROOT.glob("examples/*/")), ids=lambda folder: folder.name)
def test_the_page_of_an_example_has_its_whole_program(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    page = site.with_programs(text, folder / "README.md")
    assert page.startswith(text.rstrip("\n"))
    programs = [*folder.glob("*.py"), *folder.glob("*.toml")]
    assert all(f"\n{each.read_text().rstrip()}\n```" in page for each in programs)
    titles = [title for level, title, _ in markdown.headings(page) if level == 2]
    assert {each.name for each in (*programs, *folder.glob("*.ipynb"))} <= set(titles)
    assert programs or "import hookline" in page or "from hookline import" in page
    alone = page.partition("**Without a checkout.**")[2].partition("\n## ")[0]
    assert all(f"`{each.name}`" in alone for each in (*programs, *folder.glob("*.ipynb")))
    assert "```sh\n" in alone and "examples/" not in alone


def test_a_link_to_a_file_of_an_example_leads_to_its_page() -> None:
    readme = ROOT / "examples/notebook/README.md"
    places = {ROOT / "docs/a.md": Path("a.md"), readme: Path("examples/notebook.md")}
    text = "[one](../examples/notebook/spirals.ipynb) [two](../examples/notebook/data.bin)\n"
    linked = site.for_site(text, ROOT / "docs/a.md", places)
    assert linked == "[one](examples/notebook.md#spiralsipynb) two\n"
    anchors = markdown.heading_anchors(site.with_programs(readme.read_text(), readme))
    assert "spiralsipynb" in anchors


def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    site.stage(tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    site.write_for_models(tmp_path)
    built = tmp_path / "site"
    assert (built / "llms.txt").read_text().count("\n- [") == len(site.navigation())
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:)?//[^>]*>")
    for _, name in site.navigation():
        html = (built / name).with_suffix(".html").read_text()
        assert not loads.search(html), f"{name} loads from the network"
        assert 'data-md-component="search"' in html and 'data-md-color-scheme="slate"' in html
    notebook = "examples/notebook/spirals.ipynb"
    assert (built / notebook).read_bytes() == (ROOT / notebook).read_bytes()
    assert f'href="{notebook}"' in (built / "notebooks.html").read_text()


def test_a_build_fails_for_a_broken_anchor(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    settings = (ROOT / "zensical.toml").read_text()
    settings = re.sub(r"^nav = \[.*?^\]", "", settings, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "zensical.toml").write_text(settings)
    (tmp_path / "docs").mkdir()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    for anchor, code in (("home", 0), ("gone", 1)):
        (tmp_path / "docs/index.md").write_text(f"# Home\n\n[there](#{anchor})\n")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert bool(done.returncode) == bool(code), done.stdout + done.stderr
