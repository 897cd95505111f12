"""The socket of a running fit: a client in a shell or a page, and commands that all ranks carry out.

The socket lies in the run's directory and only the same user can open it. May import: util, engine, run.
"""
