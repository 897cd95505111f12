"""Log the learning rate of every parameter group and, on request, momentum and weight decay."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from hookline.engine.checks import checked_parameters
from hookline.engine.hook import Hook
from hookline.run.optimizers import copy_rate


class LRMonitor(Hook):
    """Logs `lr-SGD`, with several groups `lr-SGD/pg1`, with several optimizers of a kind `lr-SGD-1`.

    A scheduler's `name` and a parameter group's `name` replace these. The values are those that the update
    used, or the first update of the epoch, before a scheduler changes them. For an optimizer that made no
    update in an epoch, they are those at its start. As all built-in hooks it runs after yours: in
    on_train_epoch_end, `metrics` has its values of the epoch before, and the fact `lr` the rate now.
    """

    tier = "builtin"
    observes = True
    on_error = "warn"

    @checked_parameters
    def __init__(
        self,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        frequency: Literal["epoch", "step"] = "epoch",
    ) -> None:
        """`log_momentum`: also `...-momentum` (the first beta of Adam and its kin) and `...-beta2`.

        `log_weight_decay`: also `...-weight_decay`. `frequency`: 'epoch', or 'step' for every step whose
        metrics are logged (`Trainer(log_every_n_steps=...)`).
        """
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.frequency = frequency
        self._every = 0
        self._epoch, self._of_epoch = -1, dict[str, Any]()
        """The epoch, and its values."""
        self._updated: list[int] = []
        """The optimizers that made an update in it."""

    def setup(self) -> None:
        self._epoch = -1  # a second fit begins again; a resumed one gets its state right after this

    def on_train_start(self, trainer: Any) -> None:
        self._every = trainer.options.log_every_n_steps if self.frequency == "step" else 0

    def on_after_optimizer_step(self, trainer: Any, step: int, optimizer_idx: int) -> None:
        # here, because schedulers advance before on_step_end
        if self._every and step % self._every == 0:
            trainer.log_dict(self.values(trainer, only=optimizer_idx))
        elif self.frequency == "epoch" and optimizer_idx not in self._updated:
            # not when the epoch starts: a hook may set the rate before the first update
            self._updated.append(optimizer_idx)
            self._of_epoch |= self.values(trainer, only=optimizer_idx)

    def on_train_epoch_start(self, trainer: Any, epoch: int) -> None:
        if self.frequency == "epoch" and epoch != self._epoch:  # else a resume continues the epoch
            self._epoch, self._of_epoch, self._updated = epoch, self.values(trainer), []

    def on_train_epoch_end(self, trainer: Any) -> None:
        trainer.log_dict(self._of_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "of_epoch": self._of_epoch, "updated": self._updated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # checkpoints of earlier versions have none
            self._epoch, self._of_epoch = state["epoch"], dict(state["of_epoch"])
            self._updated = list(state["updated"])

    def values(self, trainer: Any, only: int | None = None) -> dict[str, Any]:
        """Return the current values of all metrics of this hook, or with `only` those of one optimizer."""
        found: dict[str, Any] = {}
        for index, names in enumerate(group_names(trainer)):
            if only is not None and index != only:
                continue
            for name, group in zip(names, trainer.optimizers[index].param_groups, strict=True):
                found[name] = copy_rate(group["lr"])
                betas = group.get("betas")
                if self.log_momentum:
                    found[f"{name}-momentum"] = copy_rate(betas[0] if betas else group.get("momentum", 0.0))
                    if betas:
                        found[f"{name}-beta2"] = copy_rate(betas[1])
                if self.log_weight_decay:
                    found[f"{name}-weight_decay"] = copy_rate(group.get("weight_decay", 0.0))
        return found


def group_names(trainer: Any) -> list[list[str]]:
    """Return a name for every parameter group, per optimizer. Not cached, because a run may add groups."""
    schedules = trainer.schedules
    given = {each.optimizer_idx: each.name for each in schedules if each.name}
    seen: Counter[str] = Counter()
    names = []
    for index, optimizer in enumerate(trainer.optimizers):
        kind = f"lr-{type(optimizer).__name__}"
        name = given.get(index) or (f"{kind}-{seen[kind]}" if seen[kind] else kind)
        seen[kind] += 1
        names.append(_with_groups(name, optimizer.param_groups))
    return names


def _with_groups(name: str, groups: list[dict[str, Any]]) -> list[str]:
    labels = [str(group.get("name") or f"pg{number}") for number, group in enumerate(groups, 1)]
    if len(set(labels)) < len(labels):  # the names are not unique
        labels = [f"pg{number}" for number in range(1, len(groups) + 1)]
    if len(groups) == 1 and not groups[0].get("name"):
        return [name]
    return [f"{name}/{label}" for label in labels]
