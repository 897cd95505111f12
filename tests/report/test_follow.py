"""A run that is followed while it continues shows the same as one that is read at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from report.reported import metrics, written
from tiny import Net, SavesFirstEpoch, batches, quiet

from hookline.report import follow
from hookline.report.content import page_data
from hookline.report.follow import FollowedRun
from hookline.report.reader import RunData, read_run


def shown(run: RunData) -> dict[str, Any]:
    return {key: value for key, value in json.loads(json.dumps(page_data([run]))).items() if key != "made"}


def add(path: Path, text: str) -> None:
    with (path / "log.jsonl").open("a") as log:
        log.write(text)


def line(step: int, **values: float) -> str:
    return json.dumps({"time": 1.7e9 + step, **metrics(step, **values)}) + "\n"


def test_what_comes_later_is_added_to_what_is_known() -> None:
    path = written("run", metrics(1, loss=1.0))
    followed = FollowedRun(path)
    assert not followed.refresh()
    for step in range(2, 6):
        add(path, line(step, loss=1.0 / step, lr=0.1))
        add(
            path,
            line(step, val__loss=2.0 / step)
            + json.dumps({"type": "skip", "time": 1.7e9, "step": step, "reason": "nonfinite"})
            + "\n",
        )
        assert followed.refresh()
        assert shown(followed.run) == shown(read_run(path))
    assert not followed.refresh()


def test_only_what_is_new_is_read(monkeypatch: Any) -> None:
    path = written("run", *[metrics(step, loss=1.0) for step in range(1, 50)])
    followed, taken = FollowedRun(path), []
    whole = follow.take
    monkeypatch.setattr(
        follow, "take", lambda run, record: taken.append(record["step"]) or whole(run, record)
    )
    add(path, line(50, loss=1.0) + line(51, loss=1.0))
    followed.refresh()
    assert taken == [50, 51]


def test_half_a_line_waits_for_its_other_half() -> None:
    path = written("run", metrics(1, loss=1.0), after='{"type": "metrics", "time": 1, "st')
    followed = FollowedRun(path)
    assert followed.run.records == 1
    add(path, 'ep": 2, "metrics": {"loss": 7.0}}\n')
    assert followed.refresh() and followed.run.records == 2 and followed.run.series["loss"].values[-1] == 7.0


def test_a_resume_takes_back_what_it_supersedes() -> None:
    hook = SavesFirstEpoch()
    quiet(run_dir="run", logger=True, max_epochs=3, log_every_n_steps=1, hooks=[hook]).fit(Net(), batches())
    followed = FollowedRun(Path("run"))
    assert followed.run.last_step == 12
    quiet(run_dir="run", logger=True, max_epochs=2, log_every_n_steps=1).fit(
        Net(), batches(), resume=hook.path
    )
    assert followed.refresh()
    assert followed.run.last_step == 8 and followed.run.superseded > 0
    assert shown(followed.run) == shown(read_run(Path("run")))


def test_a_log_that_is_written_anew_or_comes_late_is_read_from_its_beginning() -> None:
    path = written("run", metrics(1, loss=1.0), metrics(2, loss=1.0))
    (path / "run.json").write_text('{"id": "a", "status": "training", "step": 1, "reason": "", "limits": {}}')
    followed = FollowedRun(path)
    (path / "log.jsonl").unlink()
    assert followed.refresh() and followed.run.records == 0
    written("run", metrics(9, loss=3.0))
    assert followed.refresh() and followed.run.last_step == 9 and followed.run.records == 1
    written("run", metrics(3, loss=3.0, more=1.0))
    assert followed.refresh() and followed.run.last_step == 3


def test_a_checkpoint_or_an_end_without_a_record_is_noticed() -> None:
    path = written("run", metrics(1, loss=1.0))
    followed = FollowedRun(path)
    (path / "run.json").write_text(
        '{"id": "a", "status": "completed", "step": 1, "reason": "", "limits": {}}'
    )
    assert followed.refresh() and followed.run.record["status"] == "completed"
