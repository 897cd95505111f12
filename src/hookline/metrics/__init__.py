"""The values that a run logs: accumulators that stay on their device, and the log that reads them.

Nothing is read from the device until a value is looked at. May import: util.
"""
