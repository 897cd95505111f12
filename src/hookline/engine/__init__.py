"""The hook engine: the table of events, binding, listeners, filters, the plan, and the cost of hooks.

It does not import torch, so that `import hookline` and hooks alone stay light. May import: util.
"""
