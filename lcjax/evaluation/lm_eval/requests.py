"""Requests of lm-evaluation-harness as token ids, and the answers of a model to them.

Texts become ids as in the harness's own model for transformers (lm-eval 0.4.13: `_encode_pair` of
`TemplateLM`, `get_rolling_token_windows`, `HFLM.generate_until`), so that equal weights give equal
numbers. Batches run from the longest request to the shortest. Prompts with a common prefix share a
batch, and the prefix is read once (`lcjax.generation.shared_prefix`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lcjax.checkpoints.tokenizer import Message, Tokenizer
from lcjax.errors import InputError
from lcjax.evaluation.corpus import prefix_token
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import pad_batch
from lcjax.generation.sampling import Sampling
from lcjax.generation.scorer import Scorer
from lcjax.generation.session import pad_right

KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}


@dataclasses.dataclass(frozen=True)
class Loglikelihood:
    """`loglikelihood`: log p of `continuation` given `prompt`, and whether it is the argmax."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    cut: int = dataclasses.field(default=0, compare=False)  # tokens cut from the prompt

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.continuation)


@dataclasses.dataclass(frozen=True)
class LoglikelihoodRolling:
    """`loglikelihood_rolling`: log p of a whole text; each window scores its continuation."""

    windows: tuple[Loglikelihood, ...]
    cut = 0  # no token is cut

    @property
    def size(self) -> int:
        return sum(window.size for window in self.windows)


@dataclasses.dataclass(frozen=True)
class GenerateUntil:
    """`generate_until`: the text that the model generates after `prompt`."""

    prompt: tuple[int, ...]
    sampling: Sampling
    cut: int = dataclasses.field(default=0, compare=False)

    @property
    def size(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens


Request = Loglikelihood | LoglikelihoodRolling | GenerateUntil
# (sum of log p, whether greedy decoding gives it), sum of log p, or the generated text
Answer = tuple[float, bool] | float | str


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Makes requests of at most `length` tokens; longer prompts lose their beginning."""

    tokenizer: Tokenizer
    length: int
    new_tokens: int = 256  # for tasks that do not set it
    seed: int = 0  # of sampled answers

    @property
    def prefix(self) -> int:
        return prefix_token(self.tokenizer)

    def ids(self, text: str, bos: bool | None = None) -> list[int]:
        """Returns the token ids of a text; `bos` None adds BOS if the model expects it."""
        ids = self.tokenizer.encode(text, allow_special=True)
        add_bos = self.tokenizer.add_bos and ids[:1] != [self.prefix] if bos is None else bos
        return [self.prefix, *ids] if add_bos else ids

    def request(self, kind: str, arguments: Sequence[Any], repeat: int = 0) -> Request:
        """Returns the request of one of `KINDS`; `repeat` is the number of its repetition."""
        if kind == "loglikelihood":
            return self.choice(*self.pair(*arguments))
        if kind == "loglikelihood_rolling":
            return self.rolling(*arguments)
        if kind == "generate_until":
            return self.generate_until(*arguments, repeat=repeat)
        raise InputError(f"requests of kind {kind} are unknown; known: {', '.join(KINDS)}")

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the ids of a context and its continuation, which gets the blanks between them."""
        stripped = context.rstrip()
        if not stripped:
            ids = self.ids(context + continuation, bos=False)
            return ([self.prefix], ids) if ids[:1] != [self.prefix] else (ids[:1], ids[1:])
        # Both are encoded together, as a token may begin with the blank before a word.
        ids, first = self.ids(context + continuation), self.ids(stripped)
        return first, ids[len(first) :]

    def choice(self, prompt: Sequence[int], continuation: Sequence[int]) -> Loglikelihood:
        if not 0 < len(continuation) <= self.length:
            raise InputError(
                f"lengths: {self.length} is too short for a continuation of"
                f" {len(continuation)} tokens; use at least as many, and no empty ones"
            )
        # The last token is predicted but not read, so one more token fits.
        over = max(len(prompt) + len(continuation) - self.length - 1, 0)
        return Loglikelihood(tuple(prompt[over:]), tuple(continuation), over)

    def rolling(self, text: str) -> LoglikelihoodRolling:
        """Splits a text into blocks of `length` tokens; the last has as much context as fits."""
        ids, windows = self.ids(text), []
        for start in range(0, len(ids), self.length):
            block = ids[start : start + self.length]
            context = ids[max(start + len(block) - self.length - 1, 0) : start]
            windows.append(self.choice(context if start else [self.prefix], block))
        return LoglikelihoodRolling(tuple(windows))

    def generate_until(
        self, context: str, settings: Mapping[str, Any], *, repeat: int = 0
    ) -> GenerateUntil:
        sampling = sampling_of(settings, self.new_tokens, self.seed + repeat)
        limit = self.length - sampling.max_new_tokens
        if limit < 1:
            raise InputError(
                f"lengths: {self.length} leaves no prompt beside {sampling.max_new_tokens} new"
                " tokens; use longer ones, or set max_new_tokens"
            )
        ids = self.ids(context)
        return GenerateUntil(tuple(ids[-limit:]), sampling, max(len(ids) - limit, 0))


def sampling_of(settings: Mapping[str, Any], new_tokens: int, seed: int) -> Sampling:
    """Converts the harness's `generation_kwargs`.

    Args:
      settings: `generation_kwargs` of a task.
      new_tokens: The number of new tokens if `settings` has none.
      seed: The seed of sampled answers.

    Raises:
      InputError: A setting changes the answers and is not supported.
    """
    options = {key: value for key, value in settings.items() if value is not None}
    counts = [options.pop(name) for name in _NEW_TOKENS if name in options]
    until = options.pop("until", [])
    until = [until] if isinstance(until, str) else until
    do_sample, temperature = options.pop("do_sample", None), options.pop("temperature", None)
    # transformers samples at temperature 1 if only do_sample is set.
    temperature = 1.0 if temperature is None and do_sample else float(temperature or 0.0)
    filters = {name: value for name in ("top_k", "top_p") if (value := options.pop(name, None))}
    for name, value in options.items():
        if _NEUTRAL.get(name) != value:
            raise InputError(
                f"generation_kwargs: {name}={value} is not supported;"
                " known: until, do_sample, temperature, top_k, top_p, max_gen_toks"
            )
    return Sampling(
        max_new_tokens=int(counts[0]) if counts else new_tokens,
        temperature=0.0 if do_sample is False else temperature,
        stop=tuple(text for text in until if text),
        seed=seed if temperature and do_sample is not False else 0,
        **filters,
    )


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True
) -> str:
    """Applies the chat template, as `HFLM.apply_chat_template`.

    Without the generation prompt the last message is not closed. A template that supports no
    system message is applied without it.
    """
    messages = [{"role": m["role"], "content": m["content"]} for m in messages]
    try:
        text = tokenizer.render_chat(messages, add_generation_prompt)
    except InputError:
        others = [message for message in messages if message["role"] != "system"]
        if len(others) == len(messages):
            raise
        text = tokenizer.render_chat(others, add_generation_prompt)
    if add_generation_prompt:
        return text
    last = messages[-1]["content"].strip()
    return text[: text.rindex(last) + len(last)]


def check(model, requests: Sequence[Request]) -> None:
    """Raises InputError if `model` cannot answer one of `requests`."""
    if model.needs_documents:
        raise InputError(
            "question: tasks of lm-evaluation-harness do not say where documents end and the"
            " question begins; leave question out of methods for them"
        )
    texts = [request for request in requests if isinstance(request, LoglikelihoodRolling)]
    if texts and model.decoder_tokens is not None:
        raise InputError(
            "tasks: one needs the likelihood of whole texts, of which the decoder of this method"
            " reads only a part; leave it out, or use type=perplexity with protocol=last_k"
        )
    if not all(isinstance(r, GenerateUntil) for r in requests):
        model.config.check_scores()
    if model.decoder_tokens is not None or model.config.position != "learned":
        return
    sizes = [
        request.size - 1 for request in requests if not isinstance(request, LoglikelihoodRolling)
    ]
    model.config.check_length(max(sizes, default=0))
    # The last token of a window is only predicted, but `nll` gives it a position, too.
    max_length = model.config.max_length
    if any(window.size > max_length for request in texts for window in request.windows):
        raise InputError(
            f"lengths: whole texts are scored in windows of one token more, and this model has"
            f" {max_length} positions; use at most {max_length - 1}"
        )


def respond(
    model,
    requests: Sequence[Request],
    batch: int,
    on_answer: Callable[[int, Answer], None] | None = None,
) -> list[Answer]:
    """Returns the answer of `model` to each request.

    Args:
      model: A `Scorer`, such as a `PrefixReader` over all prompts of the run.
      requests: Requests of any kinds.
      batch: Rows of every call of the model; a smaller batch repeats its first row.
      on_answer: Called with the index and the answer of each request as soon as it is known.

    Raises:
      InputError: `model` cannot answer one of `requests`; no request has run then.
    """
    check(model, requests)
    model = model.with_shared_prefixes(prompts_of(requests))
    answers: list[Answer | None] = [None] * len(requests)
    for index, answer in _answers(model, requests, batch):
        answers[index] = answer
        if on_answer is not None:
            on_answer(index, answer)
    return answers


def prompts_of(requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """Returns the prompts that fill a KV cache, once for all choices of one prompt."""
    choices = dict.fromkeys(r.prompt for r in requests if isinstance(r, Loglikelihood))
    return [*choices, *(r.prompt for r in requests if isinstance(r, GenerateUntil))]


def _answers(model, requests, batch: int) -> Iterator[tuple[int, Answer]]:
    kinds = {Loglikelihood: _choices, LoglikelihoodRolling: _rolling, GenerateUntil: _generations}
    for kind, answers in kinds.items():
        indexed = [(n, request) for n, request in enumerate(requests) if isinstance(request, kind)]
        indexed.sort(key=lambda pair: -pair[1].size)
        yield from answers(model, indexed, batch)


def _choices(model, indexed, batch: int) -> Iterator[tuple[int, Answer]]:
    """Scores all continuations of a prompt in one batch."""
    by_prompt = group_by(indexed, _prompt)
    for rows in model.batches(list(by_prompt), batch, lambda prompt: prompt):
        prompts = pad_batch(rows, batch)
        options = [[request.continuation for _, request in by_prompt[prompt]] for prompt in prompts]
        scores = _with_movable(model, prompts).continuations(prompts, options)
        for prompt, row in zip(rows, scores):
            for (index, _), score in zip(by_prompt[prompt], row, strict=True):
                yield index, (-float(np.sum(score.nll, dtype=np.float64)), bool(score.greedy))


def _rolling(model, indexed, batch: int) -> Iterator[tuple[int, Answer]]:
    sums = {index: 0.0 for index, _ in indexed}
    num_windows = {index: len(request.windows) for index, request in indexed}
    windows = [(index, window) for index, request in indexed for window in request.windows]
    yield from ((index, 0.0) for index, count in num_windows.items() if not count)  # empty texts
    windows.sort(key=lambda pair: -pair[1].size)
    for start in range(0, len(windows), batch):
        pairs = windows[start : start + batch]
        rows = [window for _, window in pad_batch(pairs, batch)]
        tokens = pad_right([row.prompt + row.continuation for row in rows])
        first, lengths = min(len(row.prompt) for row in rows), [row.size for row in rows]
        nll = model.nll(tokens, first=first, lengths=np.array(lengths))
        for losses, (index, window) in zip(nll, pairs):
            scores = losses[len(window.prompt) : window.size]
            sums[index] -= float(np.sum(scores, dtype=np.float64))
            num_windows[index] -= 1
            if not num_windows[index]:
                yield index, sums[index]


def _generations(model, indexed, batch: int) -> Iterator[tuple[int, Answer]]:
    """Generates the answers, for all prompts with equal sampling settings together."""
    for sampling, requests in group_by(indexed, lambda pair: pair[1].sampling).items():
        for pairs in model.batches(requests, batch, _prompt):
            prompts = [request.prompt for _, request in pad_batch(pairs, batch)]
            seeded = sampling.with_seeds(prompts)
            texts = _with_movable(model, prompts).generate(prompts, seeded)
            yield from ((index, text) for (index, _), text in zip(pairs, texts))


def _prompt(pair: tuple[int, Loglikelihood | GenerateUntil]) -> tuple[int, ...]:
    return pair[1].prompt


def _with_movable(model: Scorer, prompts: Sequence[Sequence[int]]) -> Scorer:
    """Returns a model that may read all of a prompt but BOS and the last token as context."""
    bos = model.tokenizer.bos_id
    starts = [int(bos is not None and prompt[0] == bos) for prompt in prompts]
    return model.with_movable(
        [[(start, len(prompt) - 1)] for start, prompt in zip(starts, prompts)]
    )
