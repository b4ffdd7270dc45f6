"""What the harness asks a model, as token ids: continuations to score, texts to score, prompts.

Texts become ids as in the harness's own model of transformers (lm-eval 0.4.13, `_encode_pair` of
`TemplateLM`, `get_rolling_token_windows`, `HFLM.generate_until`), so that equal weights give equal
numbers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lcjax.checkpoints.tokenizer import Tokenizer
from lcjax.errors import InputError
from lcjax.evaluation.corpus import prefix_token
from lcjax.generation.sampling import Sampling

KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}


@dataclasses.dataclass(frozen=True)
class Choice:
    """How likely is `continuation` behind `prompt`, and would the model write it?"""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    cut: int = dataclasses.field(default=0, compare=False)  # tokens that the prompt has lost

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.continuation)


@dataclasses.dataclass(frozen=True)
class Rolling:
    """How likely is a whole text? Each window scores its second part behind its first."""

    windows: tuple[Choice, ...]
    cut = 0  # nothing is lost

    @property
    def size(self) -> int:
        return sum(window.size for window in self.windows)


@dataclasses.dataclass(frozen=True)
class Writing:
    """What does the model write behind `prompt`?"""

    prompt: tuple[int, ...]
    sampling: Sampling
    cut: int = dataclasses.field(default=0, compare=False)

    @property
    def size(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens


Request = Choice | Rolling | Writing


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Makes requests for models that read at most `length` tokens; longer ones lose their start."""

    tokenizer: Tokenizer
    length: int
    new_tokens: int = 256  # where a task does not say how many
    seed: int = 0  # of sampled answers

    @property
    def prefix(self) -> int:
        return prefix_token(self.tokenizer)

    def ids(self, text: str, bos: bool | None = None) -> list[int]:
        """Ids of a text, special tokens included; `bos` None: if the model expects one."""
        ids = self.tokenizer.encode(text, allow_special=True)
        wanted = self.tokenizer.add_bos and ids[:1] != [self.prefix] if bos is None else bos
        return [self.prefix, *ids] if wanted else ids

    def request(self, kind: str, arguments: Sequence[Any], repeat: int = 0) -> Request:
        """A request of the harness: its kind, its arguments, and which repetition it is."""
        if kind == "loglikelihood":
            return self.choice(*self.pair(*arguments))
        if kind == "loglikelihood_rolling":
            return self.rolling(*arguments)
        if kind == "generate_until":
            return self.writing(*arguments, repeat=repeat)
        raise InputError(f"requests of kind {kind} are unknown; known: {', '.join(KINDS)}")

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and what follows it; blanks between them go with what follows."""
        bare = context.rstrip()
        if not bare:
            ids = self.ids(context + continuation, bos=False)
            return ([self.prefix], ids) if ids[:1] != [self.prefix] else (ids[:1], ids[1:])
        # Of both together, as a word may begin with its blank.
        whole, first = self.ids(context + continuation), self.ids(bare)
        return first, whole[len(first) :]

    def choice(self, prompt: Sequence[int], continuation: Sequence[int]) -> Choice:
        if not 0 < len(continuation) <= self.length:
            raise InputError(
                f"lengths: {self.length} is too short for a continuation of"
                f" {len(continuation)} tokens; use at least as many, and no empty ones"
            )
        # The last token is predicted and not read, so there may be one more.
        over = max(len(prompt) + len(continuation) - self.length - 1, 0)
        return Choice(tuple(prompt[over:]), tuple(continuation), over)

    def rolling(self, text: str) -> Rolling:
        """Blocks of `length` tokens one after another; the last one reads back to be as long."""
        ids, windows = self.ids(text), []
        for start in range(0, len(ids), self.length):
            block = ids[start : start + self.length]
            before = ids[max(start + len(block) - self.length - 1, 0) : start]
            windows.append(self.choice(before if start else [self.prefix], block))
        return Rolling(tuple(windows))

    def writing(self, context: str, settings: Mapping[str, Any], *, repeat: int = 0) -> Writing:
        sampling = sampling_of(settings, self.new_tokens, self.seed + repeat)
        room = self.length - sampling.max_new_tokens
        if room < 1:
            raise InputError(
                f"lengths: {self.length} leaves no prompt beside {sampling.max_new_tokens} new"
                " tokens; use longer ones, or set max_new_tokens"
            )
        ids = self.ids(context)
        return Writing(tuple(ids[-room:]), sampling, max(len(ids) - room, 0))


def sampling_of(settings: Mapping[str, Any], new_tokens: int, seed: int) -> Sampling:
    """The harness's `generation_kwargs`; one that changes answers and is not known is refused."""
    left = {key: value for key, value in settings.items() if value is not None}
    counts = [left.pop(name) for name in _NEW_TOKENS if name in left]
    until = left.pop("until", [])
    until = [until] if isinstance(until, str) else until
    drawn, heat = left.pop("do_sample", None), left.pop("temperature", None)
    # With do_sample alone transformers draws at temperature 1.
    heat = 1.0 if heat is None and drawn else float(heat or 0.0)
    known = {name: value for name in ("top_k", "top_p") if (value := left.pop(name, None))}
    for name, value in left.items():
        if _NEUTRAL.get(name) != value:
            raise InputError(
                f"generation_kwargs: {name}={value} is nothing that this library's generation does;"
                " known: until, do_sample, temperature, top_k, top_p, max_gen_toks"
            )
    return Sampling(
        max_new_tokens=int(counts[0]) if counts else new_tokens,
        temperature=0.0 if drawn is False else heat,
        stop=tuple(text for text in until if text),
        seed=seed if heat and drawn is not False else 0,
        **known,
    )
