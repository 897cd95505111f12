"""Errors, text, URLs and processes: what every other package needs.

Nothing here knows hooks or torch. May import: nothing.
"""
