"""Longest common subsequences of strings and word lists, in integers as wide as the first one."""

from collections.abc import Hashable, Sequence


def lcs_length(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """How long the longest common subsequence is."""
    if not first or not second:
        return 0
    return len(first) - _columns(first, second)[-1].bit_count()


def lcs_pairs(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Places (in `first`, in `second`) of one longest common subsequence, read from the end.

    Scorers differ in which of several longest ones they find, and their union over sentences then
    differs, too. Here equals are taken where they meet; otherwise a step back is made in `second`
    if that loses less than one in `first`, and in `first` if not.
    """
    columns, pairs = _columns(first, second), []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif columns[j] >> (i - 1) & 1:  # as many without this item of `first`
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def _columns(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[int]:
    """Columns of the dynamic program: bit i of column j is 0 where item i adds one to the length.

    Hyyrö, Bit-parallel LCS-length computation revisited, 2004.
    """
    places: dict[Hashable, int] = {}
    for index, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << index
    full = (1 << len(first)) - 1
    columns = [full]
    for item in second:
        column = columns[-1]
        met = column & places.get(item, 0)
        columns.append(((column + met) | (column - met)) & full)
    return columns
