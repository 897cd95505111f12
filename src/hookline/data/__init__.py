"""Batches and loaders."""
