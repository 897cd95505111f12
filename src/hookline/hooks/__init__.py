"""Built-in hooks, one a file."""
