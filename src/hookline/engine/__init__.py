"""The hook engine: the table of events, binding, listeners, filters, the plan, and what hooks cost.

It imports no torch, so that `import hookline` and hooks alone stay light. May import: util.
"""
