"""Pallas kernels for TPUs (Mosaic)."""
