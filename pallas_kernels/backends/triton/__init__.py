"""Pallas kernels for NVIDIA GPUs from Ampere on, compiled by Triton."""
