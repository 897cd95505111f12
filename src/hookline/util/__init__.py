"""Errors, text, URLs and processes, for all other packages.

It does not know hooks or torch. May import: nothing.
"""
