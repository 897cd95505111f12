"""Exit codes."""

OK = 0
FAILED = 1
"""The run failed."""
USAGE = 2
"""A wrong command or configuration; nothing was run."""
INTERRUPTED = 130
"""Ctrl-C."""
BROKEN_PIPE = 141
"""The reader of the output was closed."""
