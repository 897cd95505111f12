"""Print metrics as lines: coloured on a terminal, plain elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import IO, Any

from hookline.engine.checks import refused
from hookline.loggers.base import Logger, check_image, finite_values, flat_params, number
from hookline.util.terminal import load_rich
from hookline.util.text import encodable


class Console(Logger):
    """Prints one line per row of metrics, e.g. `step 50  epoch 0  train/loss 0.6931  lr 0.001`.

    `stream`: by default the standard output. `color`: True, False, or None for only on a terminal.
    """

    queued = False

    def __init__(self, stream: IO[str] | None = None, color: bool | None = None) -> None:
        if stream is not None and not hasattr(stream, "write"):
            raise refused("stream", stream, "something to write to, such as sys.stderr")
        if color is not None and not isinstance(color, bool):
            raise refused("color", color, "True, False or None (only on a terminal)")
        self._stream = stream
        self._color = color

    def _line(self, where: str, *parts: tuple[str, str]) -> None:
        stream = self._stream or sys.stdout  # looked up now, because a progress bar may replace it
        shown = [(_one_line(name), _one_line(value)) for name, value in parts]
        color = self._color if self._color is not None else getattr(stream, "isatty", lambda: False)()
        if not color:
            text = "  ".join([where, *(f"{name} {value}".rstrip() for name, value in shown)]) + "\n"
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()
            return
        load_rich()
        from rich.console import Console as Screen
        from rich.text import Text

        line = Text(where, style="dim")
        for name, value in shown:
            line.append("  ").append(name, style="cyan").append(" ").append(value, style="bold")
        Screen(file=stream, force_terminal=True).print(line, soft_wrap=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self._line(
            f"step {step}  epoch {epoch}", *((name, f"{value:.4g}") for name, value in metrics.items())
        )

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        for name, value in flat_params(params).items():
            self._line("parameter", (name, str(value)))

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._line(_at(global_step), (tag, f"{number(tag, scalar_value):.4g}"))

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        shown, others = finite_values(tag, values)
        text = (
            f"min {shown.min():.4g} mean {shown.mean():.4g} max {shown.max():.4g}"
            if shown.size
            else "no finite values"
        )
        self._line(
            _at(global_step),
            (tag, f"{shown.size + others} values: {text}" + (f", {others} not finite" * bool(others))),
        )

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self._line(_at(global_step), (tag, str(text_string)))

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        check_image(tag, img_tensor)
        self._line(_at(global_step), (tag, f"image {'x'.join(map(str, img_tensor.shape))}"))

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        self._line(_at(global_step), (tag, "figure"))


def _at(step: int | None) -> str:
    return "step -" if step is None else f"step {step}"


def _one_line(text: str) -> str:
    """Return text without line breaks and control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", encodable(text))
