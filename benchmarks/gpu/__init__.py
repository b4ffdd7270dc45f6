"""NVIDIA GPUs: `attention` times and `check` proves the kernels there, `compile` needs none.

Each is run from the repository's root as `python -m benchmarks.gpu.attention`. Of the packages that
lcjax needs only jax and numpy have to be there.
"""
