"""What a compiler says about a program: whether it fits into a chip, and what it moves."""

import re
import time
from dataclasses import dataclass, field

import jax

from lcjax.cost.chips import Chip
from lcjax.cost.collectives import Traffic, collectives

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The compiler's two ways to say it: of the whole program, or of its temporaries alone.
_NEEDED = re.compile(
    r"Ran out of memory.*?(?:Used |temporaries \()([\d.]+)([KMGT]?)(?: of|\) exceeds)", re.DOTALL
)


@dataclass(frozen=True)
class Verdict:
    """Bytes are of one device, in one run of the program."""

    chip: Chip
    needed: float  # at the moment when most is
    seconds: float  # of compiling
    arguments: int = 0
    outputs: int = 0
    in_place: int = 0  # outputs that take the place of arguments
    temporaries: int = 0
    program: int = 0
    # Read and written, the body of a loop counted once; 0 where the compiler does not say.
    accessed: float = 0.0
    traffic: dict[str, Traffic] = field(default_factory=dict)
    host: int = 0  # in the memory of the device's host
    refused: bool = False  # by the compiler, for want of memory

    @property
    def fits(self) -> bool:
        return not self.refused and self.needed <= self.chip.usable

    def __str__(self) -> str:
        lines = []
        if not self.refused:
            lines = [
                f"arguments          {self.arguments / 1e9:9.2f} GB",
                f"outputs            {self.outputs / 1e9:9.2f} GB, of which"
                f" {self.in_place / 1e9:.2f} in place of arguments",
                f"temporaries        {self.temporaries / 1e9:9.2f} GB",
                f"program            {self.program / 1e9:9.2f} GB",
            ]
            if self.host:
                lines.append(f"host memory        {self.host / 1e9:9.2f} GB")
        word = "FITS" if self.fits else "DOES NOT FIT"
        lines.append(
            f"peak               {self.needed / 1e9:9.2f} GB of {self.chip.usable / 1e9:.2f} GB"
            f" that {self.chip.name} leaves to a program: {word}"
        )
        if self.accessed:
            lines.append(
                f"bytes accessed     {self.accessed / 1e9:9.1f} GB, bodies of loops counted once"
            )
        for kind, sent in self.traffic.items():
            lines.append(f"{kind:19}{sent.bytes / 1e9:9.2f} GB in {sent.count:,}")
        return "\n".join(lines)


def verdict(lowered: jax.stages.Lowered, chip: Chip) -> Verdict:
    """Compiles; a program that is too large is a verdict, every other failure an error."""
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = _NEEDED.search(str(error))
        if found is None:
            raise
        needed = float(found[1]) * _UNITS[found[2]]
        return Verdict(chip, needed, time.perf_counter() - start, refused=True)
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    return Verdict(
        chip,
        sum(sizes.values()) - 2 * sizes["in_place"],
        seconds,
        **sizes,
        host=memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        + memory.host_temp_size_in_bytes
        - memory.host_alias_size_in_bytes,
        accessed=(compiled.cost_analysis() or {}).get("bytes accessed", 0.0),
        traffic=collectives(compiled.as_text()),
    )
