"""NVIDIA GPUs: `attention` times and `check` proves the kernels there, `compile` needs none.

Each is run from the repository's root as `python -m benchmarks.gpu.attention`; an installed wheel
has this package as `lcjax.benchmarks.gpu`. Of the packages that lcjax needs only jax and numpy have
to be there.
"""
