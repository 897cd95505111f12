"""Exit codes."""

OK = 0
FAILED = 1
"""The run failed."""
USAGE = 2
"""A wrong command or configuration; nothing was run."""
INTERRUPTED = 130
"""Ctrl-C."""
HUNG = 124
"""Something did not come back, and `hang_action = "abort"` has ended the process."""
BROKEN_PIPE = 141
"""Whoever read the output went away."""
