"""Several loaders as one, without a trainer around them: batches, place, seeds, and words."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from data.resumed import Samples
from torch.utils.data import DataLoader

from hookline import OptionError
from hookline.data.loaders import make_loaders
from hookline.data.mixing import Mixture
from hookline.data.mixture import MixedLoader


def mixed(mixture: Mixture | None = None, **sources: Any) -> MixedLoader:
    return MixedLoader(
        make_loaders(sources or {"web": list("abcd"), "code": list("xy")}, 1.0, "train"), mixture or Mixture()
    )


def text(loader: MixedLoader, epoch: int = 0, position: int = 0) -> str:
    return "".join(loader.open(epoch, position))


def shuffled(n: int) -> DataLoader[Any]:
    return DataLoader(Samples(n), batch_size=1, shuffle=True)


def order(loader: MixedLoader, epoch: int = 0, seed: int | None = None) -> list[int]:
    return [round(batch[0][0, 0].item() * 12) for batch in loader.open(epoch, 0, seed)]


def test_each_epoch_begins_every_loader_anew() -> None:
    loader = mixed()
    assert loader.length == 6
    assert [text(loader, epoch) for epoch in range(3)] == ["axbycd"] * 3


def test_a_cycling_loader_gives_all_its_batches_before_any_of_them_again() -> None:
    assert (
        text(mixed(Mixture("alternating", pattern=["web", "code", "code"], epoch_length=12)))
        == "axybxycxydxy"
    )


def test_it_tells_whose_batch_it_is_before_handing_it_out() -> None:
    told: list[Any] = []
    loader = mixed()
    loader.picked = lambda index, name: told.append((index, name))
    batches = loader.open(0)
    next(batches)
    assert told == [(0, "web")]
    next(batches)
    assert told == [(0, "web"), (1, "code")]


@pytest.mark.parametrize("position", range(7))
def test_a_state_is_plain_data_from_which_another_process_continues(position: int) -> None:
    first = mixed()
    batches = first.open(0)
    drawn = "".join(next(batches) for _ in range(position))
    state = json.loads(json.dumps(first.state_dict(0, position)))
    second = mixed()
    second.load_state_dict(state)
    assert drawn + text(second, 0, position) == "axbycd"
    assert second.batches_drawn == {"web": 4, "code": 2}


def test_a_batch_that_was_drawn_and_not_used_comes_again_and_is_counted_once() -> None:
    first = mixed()
    batches = first.open(0)
    assert [next(batches), next(batches), next(batches)] == list("axb")
    state = first.state_dict(0, 2)
    assert first.state_dict(0, 3)["batches"] == {"web": 2, "code": 1}, "taking a state changes nothing"
    second = mixed()
    second.load_state_dict(state)
    assert second.batches_drawn == {"web": 1, "code": 1}
    assert text(second, 0, 2) == "bycd"


def test_a_state_is_taken_up_once() -> None:
    loader, saved = mixed(), mixed().state_dict(0, 0)
    loader.load_state_dict(saved)
    loader.cursor.revise(Mixture("sequential"))
    loader.load_state_dict(saved)
    assert text(loader) == "abcdxy", "what a hook has changed since is not undone"


def test_one_number_is_drawn_for_all_loaders_and_none_if_nothing_is_shuffled() -> None:
    before = torch.get_rng_state()
    text(mixed())
    assert torch.equal(before, torch.get_rng_state())
    loader = mixed(web=shuffled(5), code=shuffled(5))
    batches = loader.open(0)
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    list(batches)
    order(loader, 1)
    assert torch.equal(after, torch.get_rng_state()), "later loaders and epochs draw nothing more"


def test_loaders_of_one_seed_are_shuffled_differently_and_alike_every_time() -> None:
    loader, again = (
        mixed(Mixture("sequential"), a=shuffled(12), b=shuffled(12)),
        mixed(Mixture("sequential"), a=shuffled(12), b=shuffled(12)),
    )
    first, second = order(loader, 0, seed=4), order(loader, 1, seed=4)
    assert sorted(first[:12]) == sorted(first[12:]) and first[:12] != first[12:] and first != second
    assert (order(again, 0, seed=4), order(again, 1, seed=4)) == (first, second)


def test_it_can_be_put_into_words() -> None:
    loader = mixed()
    assert str(loader).splitlines() == [
        "round_robin: 6 batches an epoch (sum); exhausted loaders end",
        "  web   4 batches, all of them once",
        "  code  2 batches, all of them once",
        "  begins: web code web code web web",
    ]
    loader.remove("code")
    assert "code" not in str(loader), "as it will be"


def test_weights_can_be_checked_without_being_set() -> None:
    loader = mixed(Mixture("weighted", {"web": 1, "code": 1}))
    with pytest.raises(OptionError, match="all weights are 0"):
        loader.check_weights({"web": 0, "code": 0})
    loader.check_weights({"web": 5})
    assert loader.weights == {"web": 1, "code": 1}


def test_a_state_of_another_kind_is_refused() -> None:
    (one,) = make_loaders(list("abc"), 1.0, "train")
    with pytest.raises(OptionError, match="saved with one training loader; this run mixes web, code"):
        mixed().load_state_dict(one.state_dict(0, 1))
