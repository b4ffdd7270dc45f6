"""Measurements of this repository: scripts, and `benchmarks.gpu`, a package of several."""
