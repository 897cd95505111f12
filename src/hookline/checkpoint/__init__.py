"""Checkpoints: directories of tensors without pickle."""
