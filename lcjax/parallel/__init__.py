"""Devices and processes: meshes and sharding rules, offloading, collective communication."""
