"""Two machines, each with its own torchrun: one of them is lost, the other ends and says so, and the job continues from its save."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ranks.nodes import two_nodes, until, write

ALL_DOWN = 25.0
STEPS = 40

SCRIPT = f"""
import json, os, sys, time
from tiny import Net, batches, quiet
from hookline import Hook


class Slowly(Hook):
    def on_train_start(self, step, resumed):
        self.began, self.resumed = step, resumed

    def on_step_end(self, trainer, step):
        if step % 4 == 0:
            trainer.save_checkpoint()
        if not self.resumed:
            time.sleep(0.2)


slowly = Slowly()
with open(sys.argv[1] + "/pid-" + os.environ["RANK"], "w") as file:
    file.write(str(os.getpid()))
trainer = quiet(hooks=[slowly], run_dir=sys.argv[1] + "/run", seed=5)
trainer.fit(Net(), batches({2 * STEPS}), resume="auto")
weights = sum(float(each.sum()) for each in trainer.model.parameters())
s = trainer.state
print("RESULT", json.dumps([s.rank, s.local_rank, s.world_size, slowly.began, s.step, s.status, weights]), flush=True)
"""


def test_a_machine_that_is_gone_is_named_and_the_job_continues_from_its_newest_checkpoint(
    tmp_path: Path,
) -> None:
    script = write(SCRIPT, tmp_path)
    with two_nodes() as (first, second):
        for number, node in enumerate((first, second)):
            node.start(script, number, f"{first.address}:29500", "first")
        until(tmp_path / "run" / "checkpoints" / "step-8" / "manifest.json", 200, first, second)
        ranks = [Path(f"/proc/{(tmp_path / f'pid-{rank}').read_text()}") for rank in (0, 1)]
        second.unplug()
        gone = time.monotonic()
        second.kill()
        while any(each.exists() for each in ranks) and time.monotonic() - gone < 2 * ALL_DOWN:
            time.sleep(0.05)
        seconds = time.monotonic() - gone
        code = first.wait(120)
        said = first.log.read_text()
        assert code != 0, said
        assert seconds < ALL_DOWN, said
        lost = next(rank for rank in (0, 1) if f"[rank {1 - rank}]" in said)
        assert (
            f"[rank {1 - lost}] Rank {lost} has failed: it died without a message: it was killed, or its machine is gone"
            in said
        )

        second.plug()
        for number, node in enumerate((first, second)):
            node.start(script, number, f"{first.address}:29501", "second")
        assert [node.wait(200) for node in (first, second)] == [0, 0], (
            first.log.read_text() + second.log.read_text()
        )
        lines = "\n".join(node.log.read_text() for node in (first, second)).splitlines()
        told = sorted(json.loads(each.partition("RESULT")[2]) for each in lines if each.startswith("RESULT"))
    assert [each[:3] for each in told] == [[0, 0, 2], [1, 0, 2]]
    zero, one = told
    assert zero[3:] == one[3:]
    assert zero[3] >= 8 and zero[3] % 4 == 0  # where it was saved
    assert zero[4:6] == [STEPS, "completed"]
