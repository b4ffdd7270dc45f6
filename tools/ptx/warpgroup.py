"""A warpgroup: 128 threads that execute a kernel in lockstep, until they have to wait."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tools.ptx import matrix
from tools.ptx.arithmetic import LANE, THREADS, WARP, Fault, Registers, compute, uniform
from tools.ptx.memory import BUFFER, MAP_BYTES, PARAMETERS, SHARED, Barrier
from tools.ptx.program import Instruction, members

# They change no value: hints, registers that are moved between warpgroups (what ptxas was told
# decides), and orders that lockstep and `Memory` keep anyway.
IGNORED = {"prefetch", "setmaxnreg", "griddepcontrol"}


class Warpgroup:
    """One of a block's; `ready` says whether it may go on."""

    def __init__(self, number: int, block):
        self.number, self.block, self.memory = number, block, block.memory
        program, place = block.program, block.place
        special = {"%tid.x": np.arange(THREADS, dtype=np.uint32) + THREADS * number}
        special |= {f"%ctaid.{x}": np.full(THREADS, i) for x, i in zip("xyz", place, strict=True)}
        special["__dynamic_shmem__0"] = np.full(THREADS, SHARED)
        names = (f"{program.name}_param_{i}" for i in range(64))
        special |= dict.fromkeys(names, np.full(THREADS, PARAMETERS))
        self.registers = Registers(special)
        self.at, self.done, self.met = 0, False, 0
        self.products, self.committed = [], []  # of the matrix unit, not yet awaited
        self.stores, self.sent = [], []  # of the copy engine
        self.ready: Callable[[], bool] = lambda: True

    def run(self) -> None:
        """Executes until it has to wait, or is done."""
        self.ready = None
        while self.ready is None and not self.done:
            instruction = self.block.program.code[self.at]
            self.at += 1
            where = None
            if instruction.guard is not None:
                where = self.registers.read(instruction.guard, "pred") == instruction.wanted
            try:
                self.execute(instruction, where)
            except Fault as fault:
                raise Fault(f"{fault} (warpgroup {self.number}, {instruction})") from None

    def execute(self, instruction: Instruction, where) -> None:
        words, operands = instruction.words, instruction.operands
        own = getattr(self, f"_{words[0]}", None)
        if words[0] in IGNORED:
            return
        if own is not None:
            own(words, operands, where)
            return
        found = compute(words, operands, self.registers.read)
        if found is None:
            raise Fault("an unknown instruction")
        self.registers.write(operands[0], found, where)

    def addresses(self, operand: str) -> np.ndarray:
        base, _, more = operand.strip("[] ").partition("+")
        return self.registers.read(base, "u64").astype(np.int64) + int(more or 0)

    def one(self, where) -> int:
        """The only thread that executes an instruction."""
        chosen = np.arange(THREADS) if where is None else np.flatnonzero(where)
        if len(chosen) != 1:
            raise Fault(f"{len(chosen)} threads do what one has to")
        return int(chosen[0])

    def _bra(self, words, operands, where) -> None:
        if where is None or uniform(where):
            self.at = self.block.program.labels[operands[0]]

    def _ret(self, words, operands, where) -> None:
        if self.products or self.committed or self.stores or self.sent:
            raise Fault("the kernel ends with products or copies under way")
        self.done = True

    def _wait(self, words, operands, where) -> None:
        barrier = self.memory.barriers[uniform(self.addresses(operands[0]))]
        parity = uniform(self.registers.read(operands[1], "u32"))
        self.ready = lambda: barrier.phase != parity

    def _bar(self, words, operands, where) -> None:
        if len(operands) == 1 and operands[0] == "0":  # of all threads
            self.met += 1
            self.ready = lambda mine=self.met: all(x.met >= mine for x in self.block.warpgroups)
        elif operands[1:] != (str(THREADS),):
            raise Fault("a barrier of several warpgroups")

    def _mbarrier(self, words, operands, where) -> None:
        if words[1] == "init":
            self._begin(self.addresses(operands[0]), self.registers.read(operands[1], "u32"), where)
            return
        if words[1] != "arrive" or not self.memory.started:
            raise Fault("an unknown use of a barrier, or one before it is visible")
        barrier = self.memory.barriers[uniform(self.addresses(operands[1]))]
        many = THREADS if where is None else int(where.sum())
        number = uniform(self.registers.read(operands[2], "u32")) if len(operands) > 2 else 1
        if "expect_tx" in words:
            barrier.arrive(many, many * number)
        else:
            barrier.arrive(many * number, 0)

    def _begin(self, addresses, counts, where) -> None:
        """Barriers, each by one thread."""
        chosen = slice(None) if where is None else where
        for address, count in zip(addresses[chosen].tolist(), counts[chosen].tolist(), strict=True):
            if address % 8 or address in self.memory.barriers:
                raise Fault("a barrier is not aligned, or two threads begin it")
            self.memory.barriers[address] = Barrier(count, count)

    def _fence(self, words, operands, where) -> None:
        if words[1] == "mbarrier_init":
            self.memory.started = True
        elif words[1:3] == ("proxy", "async"):
            self.memory.fence(self.number)
        else:
            raise Fault("an unknown fence")

    def _elect(self, words, operands, where) -> None:
        lane, chosen = operands[0].split("|")
        self.registers.write(lane, np.zeros(THREADS, np.uint32))
        self.registers.write(chosen, LANE == 0)

    def _shfl(self, words, operands, where) -> None:
        values, other = (self.registers.read(x, "u32") for x in operands[1:3])
        if words[2] not in ("idx", "bfly"):
            raise Fault("an unknown shuffle")
        source = 32 * WARP + other if words[2] == "idx" else np.arange(THREADS) ^ other
        self.registers.write(operands[0].split("|")[0], values[source.astype(np.int64)], where)

    def _wgmma(self, words, operands, where) -> None:
        if words[1] == "mma_async":
            one = matrix.product(words, operands, self.registers, self.memory)
            if self.block.late:
                self.products.append(one)
            else:
                one()
        elif words[1] == "commit_group":
            self.committed.append(self.products)
            self.products = []
        elif words[1] == "wait_group":
            self._await(self.committed, int(operands[0]))
        elif words[1] != "fence":
            raise Fault("an unknown use of the matrix unit")

    @staticmethod
    def _await(groups: list, most: int) -> None:
        """Does what is under way, but for the last `most` groups."""
        while len(groups) > most:
            for work in groups.pop(0):
                work()

    def _cp(self, words, operands, where) -> None:
        if words[1:3] != ("async", "bulk"):
            raise Fault("an unknown copy")
        if words[3] == "commit_group":
            self.sent.append(self.stores)
            self.stores = []
            return
        if words[3] == "wait_group":
            self._await(self.sent, int(operands[0]))
            return
        if where is not None and not where.any():
            raise Fault("no thread of the warpgroup copies")
        thread = self.one(where)
        copy = self._box if "tensor" in words else self._row
        into, work = copy(words, operands, thread)
        if not self.block.late:
            work()
        elif into:
            self.block.copies.append(work)
        else:
            self.stores.append(work)

    def _box(self, words, operands, thread: int):
        """(whether it is to shared memory, a function that copies a box)."""
        into = any(x.startswith("mbarrier") for x in words)
        tensor = operands[1] if into else operands[0]
        pointer, place = re.fullmatch(r"\[(\S+), ?\{(.*?)\} ?\]", tensor).groups()
        number = int(self.registers.read(pointer, "u64")[thread]) - PARAMETERS
        if number % MAP_BYTES:
            raise Fault("no tensor map begins there")
        tiles = self.block.launch.tiles[number // MAP_BYTES]
        at = [int(self.registers.read(x, "s32")[thread]) for x in members(place)][::-1]
        shared = int(self.addresses(operands[0 if into else 1])[thread])
        if not into:
            return False, lambda: self.memory.copy_out(tiles, at, shared)
        if not self.memory.started:
            raise Fault("a copy for a barrier before it is visible")
        barrier = int(self.addresses(operands[2])[thread])
        return True, lambda: self.memory.copy_in(tiles, at, shared, barrier)

    def _row(self, words, operands, thread: int):
        """Bytes of shared memory that go to a buffer."""
        target, source = (int(self.addresses(x)[thread]) for x in operands[:2])
        size = int(self.registers.read(operands[2], "u32")[thread])
        if words[3] != "global" or target % 16 or source % 16 or size % 16:
            raise Fault("an unknown copy, or one that is not aligned")

        def copy() -> None:
            values = self.memory.seen_by_units(source + np.arange(size))
            self.memory.global_bytes(target, size)[:] = values

        return False, copy

    def _st(self, words, operands, where) -> None:
        """To shared memory, or by an address of all memory to a buffer."""
        is_shared = words[1] == "shared"
        address, names = self.addresses(operands[0]), members(operands[1])
        if where is not None or words[-1] not in ("b32", "f32", "u32"):
            raise Fault("an unknown store")
        if not is_shared and (words[1] not in ("v2", "v4", words[-1]) or address.min() < BUFFER):
            raise Fault("an unknown store")
        if (address % (4 * len(names))).any():
            raise Fault("a store is not aligned")
        for i, name in enumerate(names):
            values = self.registers.read(name, "u32").view(np.uint8).reshape(THREADS, 4)
            if is_shared:
                self.memory.store(self.number, _words(address + 4 * i), values)
                continue
            for place, value in zip(address + 4 * i, values, strict=True):
                self.memory.global_bytes(int(place), 4)[:] = value

    def _ldmatrix(self, words, operands, where) -> None:
        self._matrices(words, operands[0], operands[1], load=True)

    def _stmatrix(self, words, operands, where) -> None:
        self._matrices(words, operands[1], operands[0], load=False)

    def _matrices(self, words, names: str, place: str, load: bool) -> None:
        """8 x 8 numbers of 16 bits at a time, the rows of which a quarter of a warp points to."""
        if "trans" in words or "m8n8" not in words:
            raise Fault("an unknown form of it")
        address = self.addresses(place)
        for i, name in enumerate(members(names)):
            row = address[32 * WARP + 8 * i + LANE // 4]
            if (row % 16).any():
                raise Fault("a row of a matrix is not aligned")
            cells = _words(row + 4 * (LANE % 4))
            if load:
                found = np.ascontiguousarray(self.memory.load(self.number, cells))
                self.registers.write(name, found.view(np.uint32)[:, 0])
            else:
                values = self.registers.read(name, "u32").view(np.uint8).reshape(THREADS, 4)
                self.memory.store(self.number, cells, values)

    def _ld(self, words, operands, where) -> None:
        if words[1] == "param::entry":
            number = int(re.search(r"_param_(\d+)", operands[1])[1])
            found = np.full(THREADS, self.block.launch.arguments[number], np.uint64)
            self.registers.write(operands[0], found)
            return
        address, names = self.addresses(operands[1]), members(operands[0])
        if words[1] not in ("shared", "global") or where is not None or words[-1][1:] != "32":
            raise Fault("an unknown load")
        if (address % (4 * len(names))).any():
            raise Fault("a load is not aligned")
        for i, name in enumerate(names):
            if words[1] == "shared":
                found = self.memory.load(self.number, _words(address + 4 * i))
            else:
                found = np.stack([self.memory.global_bytes(int(x) + 4 * i, 4) for x in address])
            found = np.ascontiguousarray(found).view(np.uint32)[:, 0]
            signed = words[-1] == "s32" and name.startswith("%rd")
            self.registers.write(name, found.view(np.int32).astype(np.int64) if signed else found)


def _words(address: np.ndarray) -> np.ndarray:
    """Places of the four bytes at each address, [128, 4]."""
    return address[:, None] + np.arange(4)
