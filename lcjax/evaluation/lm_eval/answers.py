"""A model's answers to requests: longest first, in batches of one size, prompts read once.

Prompts that begin alike, as with the same examples, are asked together, and their beginning is read
once (`lcjax.generation.shared_prefix`); choices of one prompt are scored behind it.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lcjax.errors import InputError
from lcjax.evaluation.lm_eval.requests import Choice, Request, Rolling, Writing
from lcjax.evaluation.split import SplitModel
from lcjax.evaluation.task import filled
from lcjax.generation.sampling import Sampling
from lcjax.generation.shared_prefix import PrefixReader, batches, reader_of

# (sum of log p, whether the model would write it), sum of log p, or a text
Answer = tuple[float, bool] | float | str


def check(model, requests: Sequence[Request]) -> None:
    """Raises InputError where `model` has no answer to one of `requests`."""
    texts = [request for request in requests if isinstance(request, Rolling)]
    split = isinstance(model, SplitModel)
    if texts and split:
        raise InputError(
            "tasks: one asks for the likelihood of whole texts, which this method reads in part"
            " beside its decoder; leave it out, or use type=perplexity with protocol=last_k"
        )
    pattern = getattr(model.config, "pattern", None)
    if pattern is not None and not all(isinstance(request, Writing) for request in requests):
        pattern.check_scores()
    if split or getattr(model.config, "position", None) != "learned":
        return
    others = [request.size - 1 for request in requests if not isinstance(request, Rolling)]
    model.config.check_length(max(others, default=0))
    # The last token of a window needs a position, though it is only predicted.
    most = model.config.max_length
    if any(window.size > most for request in texts for window in request.windows):
        raise InputError(
            f"lengths: whole texts are scored in windows of one token more, and this model has"
            f" {most} positions; use at most {most - 1}"
        )


def respond(
    model,
    requests: Sequence[Request],
    batch: int,
    told: Callable[[int, Answer], None] | None = None,
) -> list[Answer]:
    """What `model` answers to each request; `told` hears of each number and answer at once.

    Every call of the model has `batch` rows, those that are lacking repeat the first one. Raises
    InputError before the first of them where `check` does. A `PrefixReader` is one of all prompts
    to come; a model without one gets its own, where it may have one.
    """
    check(model, requests)
    model = reader_of(model, prompts_of(requests))
    found: list[Answer | None] = [None] * len(requests)
    for number, answer in _answers(model, requests, batch):
        found[number] = answer
        if told is not None:
            told(number, answer)
    return found


def prompts_of(requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """What is read to be gone on from, each as often as it is asked: that of choices once."""
    choices = dict.fromkeys(r.prompt for r in requests if isinstance(r, Choice))
    return [*choices, *(r.prompt for r in requests if isinstance(r, Writing))]


def _answers(model, requests, batch: int) -> Iterator[tuple[int, Answer]]:
    kinds = {Choice: _choices, Rolling: _rolling, Writing: _writings}
    for kind, answered in kinds.items():
        own = [(n, request) for n, request in enumerate(requests) if isinstance(request, kind)]
        own.sort(key=lambda pair: -pair[1].size)
        yield from answered(model, own, batch)


def _choices(model, numbered, batch: int) -> Iterator[tuple[int, Answer]]:
    """Continuations of one prompt stay together."""
    by_prompt: dict[tuple[int, ...], list[tuple[int, Choice]]] = {}
    for number, request in numbered:
        by_prompt.setdefault(request.prompt, []).append((number, request))
    for some in batches(model, list(by_prompt), batch, lambda prompt: prompt):
        prompts = filled(some, batch)
        options = [[request.continuation for _, request in by_prompt[prompt]] for prompt in prompts]
        scored = model.continuations(prompts, options, *_beside(model, prompts))
        for prompt, row in zip(some, scored):
            for (number, _), one in zip(by_prompt[prompt], row, strict=True):
                yield number, (-float(np.sum(one.nll, dtype=np.float64)), bool(one.greedy))


def _rolling(model, numbered, batch: int) -> Iterator[tuple[int, Answer]]:
    model = model.lm if isinstance(model, PrefixReader) else model  # texts have no prompts
    sums = {number: 0.0 for number, _ in numbered}
    left = {number: len(request.windows) for number, request in numbered}
    windows = [(number, window) for number, request in numbered for window in request.windows]
    yield from ((number, 0.0) for number, count in left.items() if not count)  # an empty text
    windows.sort(key=lambda pair: -pair[1].size)
    for some in batches(model, windows, batch, _prompt):
        rows = [window for _, window in filled(some, batch)]
        tokens = np.zeros((len(rows), max(row.size for row in rows)), np.int32)
        for row, window in enumerate(rows):
            tokens[row, : window.size] = window.prompt + window.continuation
        first, lengths = min(len(row.prompt) for row in rows), [row.size for row in rows]
        nll = model.nll(tokens, first=first, lengths=np.array(lengths))
        for losses, (number, window) in zip(nll, some):
            scored = losses[len(window.prompt) : window.size]
            sums[number] -= float(np.sum(scored, dtype=np.float64))
            left[number] -= 1
            if not left[number]:
                yield number, sums[number]


def _writings(model, numbered, batch: int) -> Iterator[tuple[int, Answer]]:
    """Prompts that are continued alike run together.

    What is drawn depends on the seed and the prompt, not on the size or the order of batches.
    """
    kinds: dict[object, list[tuple[int, Writing]]] = {}
    for number, request in numbered:
        kinds.setdefault(request.sampling, []).append((number, request))
    for sampling, own in kinds.items():
        for some in batches(model, own, batch, _prompt):
            prompts = [request.prompt for _, request in filled(some, batch)]
            drawn = _drawn(sampling, prompts)
            texts = model.generate(prompts, drawn, *_beside(model, prompts))
            yield from ((number, text) for (number, _), text in zip(some, texts))


def _drawn(sampling: Sampling, prompts: Sequence[Sequence[int]]) -> Sampling:
    if not sampling.temperature:
        return sampling
    seeds = [zlib.crc32(np.array(ids, "<i4").tobytes(), sampling.seed) for ids in prompts]
    return dataclasses.replace(sampling, seed=tuple(seeds))


def _prompt(pair: tuple[int, Choice | Writing]) -> tuple[int, ...]:
    return pair[1].prompt


def _beside(model, prompts: Sequence[Sequence[int]]) -> tuple:
    """What of each prompt may be read beside the decoder: all but BOS and the last token."""
    if not isinstance(model, SplitModel):
        return ()
    bos = model.tokenizer.bos_id
    starts = [int(bos is not None and prompt[0] == bos) for prompt in prompts]
    return ([[(start, len(prompt) - 1)] for start, prompt in zip(starts, prompts)],)
