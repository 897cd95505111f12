"""Reinforcement learning with events of its own: a policy learns to balance a pole on a cart (REINFORCE).

The loop is written by hand and plays episodes; `hookline.Line` adds hooks. `on_episodes_end` is declared
here, and hooks listen to it as to any other event. `python examples/reinforcement_learning/cart_pole.py`
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from hookline import Hook, Line, declare_event, every

declare_event("on_episodes_end", facts=("returns",), doc="The episodes of an update were played.")

LONGEST = 200


class CartPoles:
    """Carts with a pole each. An episode ends when the pole falls, the cart leaves, or after 200 steps."""

    def __init__(self, count: int) -> None:
        self.count = count

    def reset(self) -> Tensor:
        """Return the first observations: position, speed, angle and angular speed of each cart."""
        self.state = torch.rand(self.count, 4) * 0.1 - 0.05
        return self.state

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Push each cart left (0) or right (1); return the next observations, and which episodes ended."""
        _, speed, angle, spin = self.state.unbind(dim=1)
        sin, cos = angle.sin(), angle.cos()
        push = (20.0 * actions - 10.0 + 0.05 * spin**2 * sin) / 1.1
        angular = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        linear = push - 0.05 * angular * cos / 1.1
        changes = torch.stack([speed, linear, spin, angular], dim=1)
        self.state = self.state + 0.02 * changes
        return self.state, (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)


def play(policy: nn.Module, carts: CartPoles) -> tuple[Tensor, Tensor, Tensor]:
    """Play an episode on each cart; return observations, actions, and which of them count."""
    observed, chosen, counted = list[Tensor](), list[Tensor](), list[Tensor]()
    seen, alive = carts.reset(), torch.ones(carts.count, dtype=torch.bool)
    while alive.any() and len(counted) < LONGEST:
        with torch.no_grad():
            actions = policy(seen).softmax(dim=-1).multinomial(1).squeeze(1)
        observed.append(seen)
        chosen.append(actions)
        counted.append(alive)
        seen, ended = carts.step(actions)
        alive = alive & ~ended
    return torch.stack(observed), torch.stack(chosen), torch.stack(counted).float()


class Progress(Hook):
    """Logs and prints the mean return of the episodes. Filters work on declared events, too."""

    @every("10 steps")
    def on_episodes_end(self, trainer: Line, step: int, returns: Tensor) -> None:
        trainer.log("return", returns.mean())
        print(f"update {step:3}   mean return {returns.mean():6.1f}   longest {returns.max():.0f}")


class StopWhenSolved(Hook):
    """Stops when the pole stays up in nearly all episodes."""

    def on_episodes_end(self, trainer: Line, returns: Tensor) -> None:
        if returns.mean() > 0.975 * LONGEST:
            trainer.stop(f"solved with a mean return of {returns.mean():.1f}")


def main() -> None:
    """Play and learn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    line = Line(policy, optimizer, hooks=[Progress(), StopWhenSolved()])
    carts = CartPoles(16)
    with line:
        for _ in line.epochs(options.updates):
            observed, chosen, counted = play(policy, carts)
            line.emit("on_episodes_end", returns=counted.sum(dim=0))
            to_go = counted.flip(0).cumsum(dim=0).flip(0)  # how long each episode still lasted
            advantage = (to_go - to_go[counted > 0].mean()) / to_go[counted > 0].std()
            log_prob = policy(observed).log_softmax(dim=-1).gather(2, chosen.unsqueeze(2)).squeeze(2)
            loss = -(log_prob * advantage * counted).sum() / counted.sum()
            optimizer.zero_grad()
            line.backward(loss)
            optimizer.step()
    print(f"{line.status} after {line.global_step} updates")


if __name__ == "__main__":
    main()
