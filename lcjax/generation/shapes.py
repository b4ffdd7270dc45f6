"""Lengths that texts are read in: few of them, since each is a program, and with little padding."""

import jax

from lcjax.errors import whole_number


def bucketed(length: int, per_octave: int = 8, least: int = 64) -> int:
    """The next of `per_octave` sizes (a power of two) between powers of two, at least `least`.

    Beyond `least` it is longer than `length` by less than a share of 1 / `per_octave`.
    """
    length = max(length, least)
    step = max((1 << (length - 1).bit_length()) // (2 * per_octave), 1)
    return -(-length // step) * step


# Tokens of a row of packed texts, but for a longer text: its table of visible blocks is made while
# the program runs, and grows with the square of the row.
LONGEST_ROW = 8192


def packing_saves(packed: int, padded: int) -> bool:
    """Whether texts are better read one behind the other, as so many tokens, than as padded rows.

    Not for less than a step of `bucketed`: what is visible in a packed row is only known when the
    program runs.
    """
    return 8 * packed <= 7 * padded


def prompt_bucket(length: int, chunk: int) -> int:
    """The length whose odd chunk has 64, 96, 128, 192, 256, 384, ... tokens: two sizes an octave.

    Each size is compiled once, so a few of them serve all prompts; beyond 64 tokens at most a third
    of the odd chunk is padding.
    """
    whole, rest = divmod(length, chunk)
    return whole * chunk + (min(bucketed(rest, 2), chunk) if rest else 0)


def prefill_chunk_size(wanted: int | None) -> int:
    """Tokens read at once; None: what keeps a matrix unit busy, or what a CPU's caches can hold."""
    if wanted is None:
        return 1024 if jax.default_backend() == "cpu" else 4096
    whole_number("prefill_chunk", wanted, 1, "leave it out for the default")
    return int(wanted)


def chunk_spans(length: int, chunk: int) -> list[tuple[int, int]]:
    """Chunks of a prompt; the odd one comes first, where there is least to attend to."""
    first = length % chunk
    edges = ([0, first] if first else [0]) + list(range(first + chunk, length + 1, chunk))
    return list(zip(edges, edges[1:], strict=False))


def unpadded_chunks(count: int, chunk: int) -> list[int]:
    """`count` tokens as whole chunks and powers of four, at most three of each: without padding."""
    sizes, size = [chunk] * (count // chunk), 1
    rest = count % chunk
    while 4 * size <= rest:
        size *= 4
    while rest:
        sizes += [size] * (rest // size)
        rest, size = rest % size, size // 4
    return sizes
