"""Benchmarks on NVIDIA GPUs: `check` tests kernels, `attention` times them, `model` times models.

`compile` needs no GPU. Run each from the repository's root, as in `python -m
benchmarks.gpu.attention`; an installed wheel has this package as `lcjax.benchmarks.gpu`. Of the
packages that lcjax needs, only jax and numpy are required, except by `model` (see
`model_runs.NEEDED`).
"""
