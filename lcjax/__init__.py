"""Every published way to make a language model read more than it was trained for, in JAX.

Letters used for array axes everywhere: `B` batch, `T` query length, `S` key length, `N` query
heads, `K` key/value heads, `G = N/K`, `H` head size, `D` model width, `F` feed-forward width,
`V` vocabulary, `L` layers, `C` context chunks.
"""
