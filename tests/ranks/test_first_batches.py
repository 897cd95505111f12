"""Each rank writes down and compares the first batch after a save for itself."""

from __future__ import annotations

from pathlib import Path

from ranks.torchrun import torchrun

SCRIPT = '''
import json, logging, os, random
from pathlib import Path
from tiny import Net, quiet
from data.resumed import Samples
from torch.utils.data import DataLoader, IterableDataset
from hookline import Hook

RANK = int(os.environ["RANK"])

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

class Saves(Hook):
    def on_train_batch_end(self, trainer, batches_seen):
        if batches_seen == 2:
            trainer.save_checkpoint(trainer.run_dir / "c")

class Own(IterableDataset):
    """This rank's own samples; those of rank 1 come in another order each time."""
    shards_itself = True

    def __iter__(self):
        order = list(range(24))
        if RANK:
            random.Random(random.SystemRandom().random()).shuffle(order)
        return (Samples(24)[index] for index in order)

def fit(name, loader, hooks=(), resume=None):
    quiet(run_dir=name, strategy="ddp", device="cpu", hooks=hooks, seed=1).fit(Net(), loader, resume=resume)

for name, make in {"shared": lambda: DataLoader(Samples(36), 3, shuffle=True), "own": lambda: DataLoader(Own(), 3)}.items():
    lines = []
    handler = Lines()
    fit(name, make(), [Saves()])
    logging.getLogger("hookline").addHandler(handler)
    fit(name, make(), resume=f"{name}/c")
    logging.getLogger("hookline").removeHandler(handler)
    path = Path(name) / "batches" / f"rank-{RANK}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    found = [[each["batch"] for each in records], sum("did not deliver the expected batch" in each for each in lines)]
    print("FOUND", RANK, name, json.dumps(found), records[0]["floats"], flush=True)
'''


def test_each_rank_compares_its_own_batch(tmp_path: Path) -> None:
    done = torchrun(SCRIPT, tmp_path, deadline=170)
    assert done.code == 0, done.output
    found = {tuple(each.split(" ", 2)[:2]): each.split(" ", 2)[2] for each in done.lines("FOUND ")}
    assert {key: text.partition("]] ")[0][:9] for key, text in found.items()}.keys() == {
        ("0", "shared"),
        ("1", "shared"),
        ("0", "own"),
        ("1", "own"),
    }
    for rank, name, warnings in (("0", "shared", 0), ("1", "shared", 0), ("0", "own", 0), ("1", "own", 1)):
        assert found[rank, name].startswith(f"[[2], {warnings}]"), (
            rank,
            name,
            found[rank, name],
            done.output,
        )
    assert found["0", "shared"] != found["1", "shared"], "ranks have different batches"
