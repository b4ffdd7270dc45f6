"""Implementations of attention, one folder per compiler; `pallas_kernels.dispatch` picks one."""
