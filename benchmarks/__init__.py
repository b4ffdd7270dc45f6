"""Benchmarks of this repository: scripts, and the package `benchmarks.gpu` for NVIDIA GPUs."""
