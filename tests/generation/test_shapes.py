"""Texts of all lengths are read in few shapes, with little padding or with none."""

import pytest

from lcjax.generation.session import (
    padded_chunks,
    prompt_bucket,
    round_up_to_bucket,
    unpadded_chunks,
)


@pytest.mark.parametrize(("per_octave", "least"), [(8, 64), (2, 64), (2, 48), (1, 32), (1, 1)])
def test_sizes_are_few_and_near_the_length(per_octave, least):
    sizes = set()
    for length in range(1, 9000):
        size = round_up_to_bucket(length, per_octave, least)
        sizes.add(size)
        assert length <= size and (size == least or size < length * (1 + 1 / per_octave))
    assert len(sizes) <= 1 + per_octave * ((2**14 // least).bit_length() - 1)
    assert {2**n for n in range(14) if 2**n >= least} <= sizes


@pytest.mark.parametrize("chunk", [40, 1024, 4096, 10**9])
def test_prompts_of_all_lengths_are_read_in_a_few_compiled_shapes(chunk):
    sizes = set()
    for length in range(1, 9000):
        padded = prompt_bucket(length, chunk)
        chunks = padded_chunks(padded, chunk)
        assert sum(chunks) == padded >= length
        sizes |= set(chunks)
        # What is read for nothing: a third of the odd chunk, or a few dozen tokens.
        assert padded - length <= max(64, chunks[0] / 3)
    assert max(sizes) <= chunk
    assert len(sizes) <= 16


def test_chunks_without_padding_are_few_and_of_few_sizes():
    for count in range(1, 300):
        sizes = unpadded_chunks(count, 100)
        assert sum(sizes) == count and set(sizes) <= {100, 64, 16, 5, 4, 3, 2, 1}
        assert all(sizes.count(size) <= 3 for size in (64, 16, 4))
        # A cache may read a single token as a generated one.
        assert count == 1 or 1 not in sizes
    for count in range(2, 40):
        sizes = unpadded_chunks(count, 9)
        assert sum(sizes) == count and max(sizes) <= 9 and 1 not in sizes
