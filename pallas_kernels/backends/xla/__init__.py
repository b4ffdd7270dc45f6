"""Blockwise attention in plain JAX: runs everywhere."""
