"""NVIDIA GPUs: `check` proves kernels, `attention` times them and `model` whole models.

`compile` needs no GPU. Each is run from the repository's root as `python -m
benchmarks.gpu.attention`; an installed wheel has this package as `lcjax.benchmarks.gpu`. Of the
packages that lcjax needs only jax and numpy have to be there, but for `model`
(`model_runs.NEEDED`).
"""
