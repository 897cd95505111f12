"""The control socket of a running fit: the server, the client for shells and pages, and the commands.

The socket is in the run's directory, and only the same user can open it. May import: util, engine, run.
"""
