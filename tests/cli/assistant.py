"""An assistant: the real client of the MCP SDK, connected to a real `hookline mcp` process, for tests that are not async."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

if TYPE_CHECKING:
    from mcp import Client


class Refusal(Exception):
    """A tool answered with an error."""


class Assistant:
    """Calls tools, and knows nothing but their JSON."""

    def __init__(self, client: Client, portal: BlockingPortal, errors: Path) -> None:
        self.client, self.portal, self.errors = client, portal, errors

    def tools(self) -> dict[str, Any]:
        """The tools by name."""
        return {each.name: each for each in self.portal.call(self.client.list_tools).tools}

    def ask(self, tool: str, /, **given: Any) -> Any:
        """The structured answer of a tool."""
        result = self.portal.call(self.client.call_tool, tool, given)
        if result.is_error:
            raise Refusal(result.content[0].text)
        return result.structured_content

    def refused(self, tool: str, /, **given: Any) -> str:
        """The error of a tool."""
        try:
            answer = self.ask(tool, **given)
        except Refusal as refusal:
            text = str(refusal)
            assert "Traceback" not in text
            return text.removeprefix(f"Error executing tool {tool}: ")
        raise AssertionError(f"{tool} answered {answer}")


@contextlib.contextmanager
def assistant(folder: Path, *words: str) -> Iterator[Assistant]:
    """Connect to a server that was started in this folder."""
    # not above: whoever collects the tests would wait for it
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    passed = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PYTHON", "OMP_", "ATEN_", "MKL_"))
    }
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "hookline", "mcp", *words], env=passed, cwd=folder
    )
    path = folder / "server-errors.txt"
    with path.open("w") as errors, start_blocking_portal() as portal:
        connection = Client(stdio_client(server, errlog=errors))
        with portal.wrap_async_context_manager(connection) as client:
            yield Assistant(client, portal, path)
