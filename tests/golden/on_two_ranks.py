"""The golden trainings of two ranks, for torchrun: what each rank found is printed, to be read by `ranks.torchrun.cases`."""

from __future__ import annotations

from pathlib import Path

from golden.training import TWO_RANKS, facts
from ranks.worlds import report

GOLDEN = Path(__file__).parent


def make() -> None:
    """Cut every training, and train it once more without a cut; leaves the cut runs below the current directory."""
    for name, train in TWO_RANKS.items():
        train(f"{name}/run", cut=True)
        report(
            f"{name} restored",
            lambda name=name, train=train: train(f"{name}-resumed", resume=checkpoint(Path(name)))[2],
        )
        report(f"{name} final", lambda name=name, train=train: facts(train(f"{name}-whole")[0]))


def main() -> None:
    """Resume every golden checkpoint of two ranks."""
    for version in versions():
        for name in (each for each in TWO_RANKS if (GOLDEN / version / each).is_dir()):
            trainer, _, loaded = TWO_RANKS[name](
                f"{version}-{name}", resume=checkpoint(GOLDEN / version / name)
            )
            report(f"{version} {name} restored", lambda loaded=loaded: loaded)
            report(f"{version} {name} final", lambda trainer=trainer: facts(trainer))


def versions() -> list[str]:
    """Every version that has left golden files."""
    return sorted(each.name for each in GOLDEN.glob("v*") if each.is_dir())


def checkpoint(folder: Path) -> Path:
    """The checkpoint in a golden folder that its training is resumed from."""
    (found,) = (folder / "run" / "checkpoints").glob("batch-*")
    return found
