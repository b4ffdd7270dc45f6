"""An emulator of PTX: runs a kernel that was compiled for a Hopper GPU, instruction by instruction.

Made for what Mosaic-GPU emits: warpgroups in lockstep, the copy engine, barriers in shared memory
and the asynchronous matrix unit, with NVIDIA's rules for who may touch what and when. What it does
not know, and what breaks a rule, is a `Fault`.

program.py parses the text, host.py reads how the kernel is launched, memory.py holds buffers,
shared memory and barriers, arithmetic.py what threads compute, matrix.py the matrix unit,
warpgroup.py executes, machine.py runs the blocks of a grid. Source: NVIDIA's PTX ISA 9.0.
"""
