"""The data of a page: every part of a run, within limits, with secrets masked."""

from __future__ import annotations

import base64
import random
import re
from pathlib import Path

import pytest
import torch
from report.reported import curve, data_in, data_of, metrics, page_of, whole_run, written
from tiny import Net, batches, quiet

from hookline.hooks import ModelCheckpoint
from hookline.loggers import JSONLines
from hookline.report import content


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
    monkeypatch.setattr(content, "MOST_CHECKPOINTS", 1)
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
