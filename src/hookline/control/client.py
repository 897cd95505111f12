"""From a shell or a page to a running job: one line of JSON there, one back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hookline.control.address import SOCKET, connect
from hookline.errors import HooklineError, OptionError, closest

PATIENCE = 60.0
"""Seconds to wait for an answer: a step, a validation or a save may be going on."""
LONGEST_ANSWER = 16_000_000


class NotRunning(HooklineError):
    """Nobody trains in this directory, or not on this machine."""


class Refused(HooklineError):
    """The job did not do what it was asked."""


def ask(run_dir: Path | str, command: str, *, patience: float = PATIENCE, **given: Any) -> dict[str, Any]:
    """What the job that trains in this directory answers; `Refused` if it says no, `NotRunning` if there is
    none.
    """
    path = Path(run_dir)
    check_directory(path)
    request = json.dumps({"command": command, "patience": patience, **given}) + "\n"
    try:
        # the job answers within `patience`; only one that is stopped or swapped out does not
        with connect(path, patience + 10.0) as connection:
            connection.sendall(request.encode())
            line = connection.makefile("rb").readline(LONGEST_ANSWER)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotRunning(_nobody(path, error)) from None
    except PermissionError as error:
        raise Refused(
            f"{path / SOCKET} cannot be opened: {error.strerror or error}. Only the user who trains can."
        ) from None
    except TimeoutError:
        raise Refused(f"The job in {path} takes connections but does not answer.") from None
    except OSError as error:
        raise NotRunning(f"The job in {path} cannot be reached: {error.strerror or error}.") from None
    if not line.endswith(b"\n"):
        raise NotRunning(f"The job in {path} ended before it answered.")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise Refused(str(answer["error"]))
    return answer


def check_directory(path: Path) -> None:
    """Refuse what cannot be a run's directory, and say what may have been meant."""
    if not path.exists():
        near = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        raise OptionError(f"{path} does not exist.{closest(path.name, near)}")
    if not path.is_dir():
        raise OptionError(f"{path} is a file; give the directory of a run, such as {path.parent}.")


def _nobody(path: Path, error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return (
            f"Nobody answers in {path}: the job was killed, or it runs on another machine. "
            "Ask on the machine that rank zero trains on."
        )
    below = sorted(
        str(each.parent) for pattern in (f"*/{SOCKET}", f"*/*/{SOCKET}") for each in path.glob(pattern)
    )
    hint = f" Below it there are: {', '.join(below[-5:])}." if below else ""
    return (
        f"No job is training in {path}, or it was told not to listen (control=False): there is no "
        f"{SOCKET}.{hint}"
    )
