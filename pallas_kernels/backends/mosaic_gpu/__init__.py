"""Pallas kernels for Hopper GPUs (Mosaic-GPU)."""
