"""The settings of a mixture: what is refused before any loader is there."""

from __future__ import annotations

from typing import Any

import pytest

from hookline import OptionError
from hookline.data.mixing import Mixture, check_mixture

Lengths = dict[str, int | None]


def refused(*args: Any, lengths: Lengths | None = None, names: list[str] | None = None, **kwargs: Any) -> str:
    lengths = {"web": 5, "code": 3} if lengths is None else lengths
    with pytest.raises(OptionError) as error:
        check_mixture(Mixture(*args, **kwargs), names or list(lengths), lengths)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "weigthed"}, "order='weigthed' is unknown. Did you mean 'weighted'?"),
        ({"order": 3}, "order=3 is unknown. Allowed: 'sequential'"),
        (
            {"epoch_length": "summ"},
            "epoch_length='summ' is unknown. Did you mean 'sum'? Allowed: 'sum', 'max', 'min', or a whole number",
        ),
        ({"epoch_length": 0}, "epoch_length=0 must be a whole number of batches, 1 or more"),
        ({"epoch_length": True}, "epoch_length=True must be a whole number"),
        ({"epoch_length": 2.5}, "epoch_length=2.5 must be a whole number"),
        ({"when_exhausted": "stop"}, "when_exhausted='stop' is unknown. Allowed: 'cycle', 'end', None"),
        ({"burst": 0}, "burst=0 must be a whole number"),
        ({"window": 0}, "window=0 must be a whole number"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
        ({"order": "weighted", "weights": [1, 2]}, "weights=[1, 2] must map names of loaders to numbers"),
        ({"order": "alternating", "pattern": "web"}, "pattern='web' must be a list of names of loaders"),
        ({"order": "weighted"}, "order='weighted' needs weights"),
        ({"order": "alternating"}, "order='alternating' needs a pattern"),
        ({"weights": {"web": 1}}, "order='round_robin' does not use weights; use order='weighted'"),
        ({"pattern": ["web"]}, "order='round_robin' does not use a pattern; use order='alternating'"),
        ({"order": "sequential", "burst": 2}, "order='sequential' does not use burst (it is 2)"),
        (
            {"order": "random", "weights": {"web": -1, "code": 1}},
            "the weight of 'web' is -1.0; it must be 0 or more",
        ),
        ({"order": "random", "weights": {"web": float("nan"), "code": 1}}, "the weight of 'web' is nan"),
        ({"order": "random", "weights": {"web": float("inf"), "code": 1}}, "the weight of 'web' is inf"),
        (
            {"order": "weighted", "weights": {"web": 0, "code": 0}},
            "all weights are 0 (web, code), so there is nothing to draw",
        ),
        (
            {"order": "weighted", "weights": {"web": 1, "cod": 1, "code": 1}},
            "weights names 'cod', which is not a loader. Did you mean 'code'?",
        ),
        (
            {"order": "weighted", "weights": {"web": 1}},
            "weights has no entry for the loader 'code'; give it a weight, or 0",
        ),
        (
            {"order": "alternating", "pattern": ["web", "wbe"]},
            "pattern names 'wbe', which is not a loader. Did you mean 'web'? Loaders: web, code.",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_the_right_one(settings: dict[str, Any], message: str) -> None:
    assert message in refused(**settings)


def test_everything_wrong_is_said_at_once() -> None:
    text = refused("weighted", {"wbe": 1}, lengths={"web": None, "code": 0})
    assert "5 problems" in text
    assert text.count("\n  - ") == 5
    assert "2 problems" in refused("sorted", burst=-1)
