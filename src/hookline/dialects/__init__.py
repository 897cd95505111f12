"""Dialects: hooks and trainers written for another interface, run by the one plan and the one loop.

Each is a table of the methods its document names, and a view of the facts it knows by other names or numbers.
"""
