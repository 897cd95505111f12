"""The JSON schema of a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

from hookline.config import schema
from hookline.config.load import SECTIONS
from hookline.config.schema import of_type
from hookline.config.sections import option_names


def test_the_schema_knows_every_section_option_and_built_in_hook(project: Path) -> None:
    described = json.loads(json.dumps(schema()))
    assert set(described["properties"]) == set(SECTIONS)
    assert set(described["properties"]["trainer"]["properties"]) == set(option_names())
    trainer = described["properties"]["trainer"]["properties"]
    assert trainer["max_steps"] == {
        "type": "integer",
        "minimum": -1,
        "default": -1,
        "description": "Number of optimizer updates. -1: no limit.",
    }
    assert trainer["nonfinite"]["enum"] == ["stop", "skip"] and "boolean" in str(trainer["audit"])
    assert all(each["description"] for each in trainer.values())
    assert described["additionalProperties"] is False
    optimizer = described["properties"]["optimizer"]["anyOf"][1]["properties"]
    assert {"groups", "layer_decay", "layers"} <= set(optimizer)
    hooks = described["properties"]["hooks"]["anyOf"][1]["properties"]
    assert {"progress_bar", "hook_classes", "enable_lr_monitor"} <= set(hooks)
    bar = hooks["progress_bar"]["anyOf"][1]["properties"]
    assert bar["refresh"]["type"] == bar["init_args"]["properties"]["refresh"]["type"] == "number"


@pytest.mark.parametrize(
    ("hint", "described"),
    [
        (int | None, {"type": ["integer", "null"]}),
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (dict[str, int], {"type": "object"}),
        (Literal["a", "b"], {"enum": ["a", "b"]}),
        (Any, {}),
        (None, {}),
        (
            Sequence[float] | str,
            {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]},
        ),
        (Callable[..., Any], {"type": ["string", "object"]}),
    ],
)
def test_types_as_schemas(hint: Any, described: dict[str, Any]) -> None:
    assert of_type(hint) == described
    assert "class_path" in json.dumps(of_type(nn.Module))
