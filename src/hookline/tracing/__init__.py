"""A run as a timeline: every event and every call with its time, step, rank and plain facts, in Chrome's
trace format.
"""
