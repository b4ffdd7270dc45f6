"""What a conversation and a reader need of a retriever: its interface, and the text of its hits.

A retriever is any object with `search(queries, k)`, which returns the hits of every query, the best
first; a hit has `score` and `passage.id`, `.title` and `.text`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lcjax.errors import InputError

SEPARATOR = "\n\n"  # after a passage in front of a text


class Retriever(Protocol):
    """An object that finds passages, such as `lcjax.retrieval.Retriever`."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Any]]:
        """Returns the `k` best hits of every query."""


class Search(NamedTuple):
    """A query and its hits, the passages that a text was read with."""

    query: str
    hits: tuple  # the best first
    num_tokens: int = 0  # number of tokens generated before the search


def check_retriever(retriever: Retriever) -> None:
    """Raises an InputError unless `retriever` has a `search` method."""
    if not callable(getattr(retriever, "search", None)):
        raise InputError(
            f"retriever={retriever!r:.60} has no search(queries, k); open a datastore with"
            " lcjax.retrieval.Retriever.open(folder)"
        )


def search(retriever: Retriever, queries: Sequence[str], k: int) -> list[tuple]:
    """Returns the hits of every query, without hits whose text is blank.

    A blank query has no hits and is not searched.
    """
    for query in queries:
        if not isinstance(query, str):
            raise InputError(f"queries: {query!r:.40} must be a text")
    with_text = [query for query in queries if query.strip()] if k else []
    results = list(retriever.search(with_text, k)) if with_text else []
    if len(results) != len(with_text):
        raise InputError(
            f"retriever={retriever!r:.40} returned {len(results)} lists of hits for"
            f" {len(with_text)} queries; its search must return one for each"
        )
    results = iter(results)
    rows = [next(results) if k and query.strip() else () for query in queries]
    return [tuple(hit for hit in row if hit.passage.text.strip()) for row in rows]


def join_title(title: str, text: str, separator: str = "\n") -> str:
    """Returns a text after the title of its document, if there is one."""
    return f"{title}{separator}{text}" if title else text
