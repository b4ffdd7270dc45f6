"""Devices and processes: meshes, sharding rules, offloading, digests, collective communication."""
