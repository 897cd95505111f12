"""Asking a running job for something from outside: a socket in the run's directory, and what can be asked
over it.
"""
