"""The values that a run logs: accumulators that stay on their device, and the log that reads them.

A value is read from its device only when it is used. May import: util.
"""
