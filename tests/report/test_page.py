"""The page: complete in itself, nothing of a run becomes markup, and its size has a limit."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from report.reported import MARKUP, curve, data_in, data_of, metrics, page_of, whole_run, written
from tiny import Net, batches, quiet

from hookline.hooks import ModelCheckpoint
from hookline.loggers import JSONLines
from hookline.report import page as page_module
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


# ---- the data of a page ------------------------------------------------------------------------------------


def test_checkpoints_configuration_versions_text_and_pictures_are_there() -> None:
    data = data_of(whole_run())
    assert {each["reason"] for each in data["checkpoints"]} == {"best", "last"}
    assert all(
        each["score"].startswith("val/loss ") and each["bytes"] > 0
        for each in data["checkpoints"]
        if each["reason"] == "best"
    )
    assert {each["key"]: each["values"] for each in data["config"]}["options.max_epochs"] == ["3"]
    assert {"hookline", "torch", "python"} <= {each["key"] for each in data["versions"]}
    assert [item["step"] for item in data["texts"][0]["items"]] == [12, 8, 4]  # the newest first
    assert [each["step"] for each in data["pictures"]] == [4, 8, 12]
    assert base64.b64decode(data["pictures"][0]["src"]).startswith(b"\x89PNG")


def test_a_run_without_some_of_it_has_no_empty_parts() -> None:
    data = data_of(written("run", metrics(1, train__loss=1.0)))
    assert [part["title"] for part in data["sections"]] == ["Loss and metrics"]
    for part in ("heat", "checkpoints", "cost", "texts", "pictures", "config", "versions", "notes"):
        assert data[part] == []


def test_runs_side_by_side_keep_their_numbers_and_show_what_differs() -> None:
    written("a/run", {"type": "hyperparams", "params": {"lr": 0.1}}, metrics(1, loss=1.0))
    written("b/run", {"type": "hyperparams", "params": {"lr": 0.2, "width": 3}}, metrics(1, loss=2.0))
    data = data_of(Path("a/run"), Path("b/run"))
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
    assert [curve(data, "loss", run)["y"] for run in (0, 1)] == [[1.0], [2.0]]
    assert data["config"] == [
        {"key": "lr", "values": ["0.1", "0.2"]},
        {"key": "width", "values": [None, "3"]},
    ]


def test_a_masked_secret_stays_masked() -> None:
    params = {"hooks": {"webhook": {"url": "***"}}, "api_key": "***"}
    assert all(
        each["values"] == ["***"]
        for each in data_of(written("run", {"type": "hyperparams", "params": params}))["config"]
    )


def test_a_cost_record_becomes_a_table() -> None:
    row = {
        "hook": "h",
        "event": "on_step_end",
        "calls": 3,
        "total": 0.3,
        "mean": 0.1,
        "worst": 0.2,
        "share": 0.01,
    }
    data = data_of(written("run", metrics(1, loss=1.0), {"type": "cost", "rows": [row]}))
    assert data["cost"] == [{"run": 0, "since": None, "rows": [row]}]


def test_the_cost_of_a_resumed_run_says_that_it_is_of_the_last_job() -> None:
    first, resume = (
        {"type": "cost", "rows": [{"hook": "a"}]},
        {"type": "resume", "step": 3, "checkpoint": "x"},
    )
    path = written(
        "run",
        metrics(1, loss=1.0),
        first,
        resume,
        metrics(4, loss=1.0),
        {"type": "cost", "rows": [{"hook": "b"}]},
    )
    cost = data_of(path)["cost"]
    assert [(each["since"], each["rows"][0]["hook"]) for each in cost] == [(3, "b")]


def test_a_picture_from_outside_of_the_run_is_not_taken_in() -> None:
    Path("secret.png").write_bytes(b"\x89PNG\r\n\x1a\nsecret")
    path = written(
        "run",
        {"type": "image", "tag": "a", "step": 1, "path": "../secret.png"},
        {"type": "image", "tag": "b", "step": 1, "path": "link.png"},
        {"type": "image", "tag": "c", "step": 1, "path": "log.jsonl"},
    )
    (path / "link.png").symlink_to(Path("secret.png").resolve())
    data = data_of(path)
    assert data["pictures"] == [] and any(each.startswith("3 pictures") for each in data["notes"])


def test_a_page_stays_small_whatever_the_run_has_logged() -> None:
    values, log = random.Random(0), JSONLines("run/log.jsonl")
    names = [f"metric{index}" for index in range(450)] + [f"grad_norm/layer{index}" for index in range(250)]
    for step in range(1, 301):
        log.log_metrics({name: values.random() for name in names}, step * 1000, 0)
        log.add_text(f"tag{step}", "word " * 2000, step)
    for step in range(40):
        log.add_image("noise", torch.rand(3, 200, 200), step)
    log.close()
    page = page_of(Path("run"))
    assert len(page) < 3_200_000
    notes = " ".join(data_in(page)["notes"])
    assert "50 metrics beyond" in notes and "pictures are not in this page" in notes


def test_every_part_that_is_left_out_for_its_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {f"key{index}": index for index in range(810)}
    texts = [{"type": "text", "step": 1, "tag": f"tag{index}", "text": "w " * 2000} for index in range(55)]
    path = written(
        "run",
        {"type": "hyperparams", "params": params},
        *texts,
        metrics(1, **{f"metric{index}": 1.0 for index in range(404)}),
    )
    quiet(run_dir="run", max_epochs=2, hooks=[ModelCheckpoint(save_top_k=-1)]).fit(Net(), batches(1))
    monkeypatch.setattr(page_module, "MOST_CHECKPOINTS_SHOWN", 1)
    data = data_of(path)
    assert [len(data[part]) for part in ("config", "texts", "summary", "checkpoints")] == [800, 50, 400, 1]
    notes = "\n".join(data["notes"])
    assert "10 keys of the configuration are not shown: key800, key801" in notes
    assert "The texts of 5 tags are not in this page because of its size: tag50, tag51" in notes
    assert "4 metrics are not in the table of values: metric400, metric401, metric402, metric403" in notes
    assert re.search(r"1 older checkpoints are not in the table: checkpoints/", notes)


def test_more_records_make_no_larger_page() -> None:
    sizes = []
    for count in (3_000, 12_000):
        log = JSONLines(f"run{count}/log.jsonl")
        for step in range(1, count + 1):
            log.log_metrics({"train/loss": 1.0 / step + step % 7}, step, 0)
        log.close()
        data = data_of(Path(f"run{count}"))
        assert data["summary"][0]["count"] == count
        sizes.append(len(curve(data, "train/loss")["x"]))
    assert max(sizes) <= 1000
