"""Implementations of attention, one folder per compiler; `pallas_kernels.dispatch` chooses one."""
