"""Prompts of typed segments: encoding, token budgets, and truncation.

prompt_encoder = PromptEncoder(tokenizer, "chat")
prompt = prompt_encoder.prompt([
    Segment("instruction", "Read this.\n"), Segment("context_doc", text),
    Segment("question", "\nWho spoke?"), Segment("answer_prefix", "\nAnswer:"),
])
prompt = fit(prompt, Budget(4096, new_tokens=32), tokenizer, "middle")
prompt.ids, prompt.movable         # token ids, and the spans that may move to the context

Segments are encoded one by one, each as part of a longer text. So lengths are known before a prompt
is made, and truncation does not change other segments. A segment begins with its separator.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from lcjax.checkpoints.tokenizer import Tokenizer, encode_mid_text, without_bos
from lcjax.errors import InputError, check_one_of
from lcjax.evaluation.corpus import start_token
from lcjax.generation.scorer import PassageSpan

KINDS = (
    "instruction", "context_doc", "demo", "passage", "context", "question", "answer_prefix",
)  # fmt: skip
# `passage`: retrieved passages, the best first; `context`: passages or demonstrations only for the
# context. Each one is read whole. If a prompt has any of these, nothing else moves to the context.
PASSAGES = ("passage", "context")
SHRINKABLE = ("context_doc", "demo", *PASSAGES)  # may be truncated, and may move to the context
TEMPLATES = ("none", "chat")
_USER = "@@lcjax-body@@"  # placeholder in a rendered template


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a prompt with a role, as text or as token ids without special tokens."""

    kind: str
    text: str = ""
    ids: Sequence[int] | None = None
    score: float | None = None  # retrieval score of a passage

    def __post_init__(self):
        check_one_of("segment kind", self.kind, KINDS)


@dataclasses.dataclass(frozen=True)
class Span:
    """The token range of a segment; `kind` may also be bos or template."""

    kind: str
    start: int
    stop: int
    score: float | None = None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids int32 [n] and their spans."""

    ids: np.ndarray
    spans: tuple[Span, ...]
    truncated: int = 0  # number of tokens that were removed

    def tokens(self, *kinds: str) -> int:
        """Returns the number of tokens of these kinds."""
        return sum(span.stop - span.start for span in self.spans if span.kind in kinds)

    def start(self, kind: str) -> int:
        """Returns the index of the first token of the first segment of a kind."""
        return next(span.start for span in self.spans if span.kind == kind)

    @property
    def movable(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every segment that may move to the context, in order."""
        return tuple((s.start, s.stop) for s in self.spans if s.kind in SHRINKABLE)

    @property
    def passages(self) -> tuple[PassageSpan, ...]:
        """The passages that models with a context read whole, in order."""
        ranks = itertools.count()
        return tuple(
            PassageSpan(s.start, s.stop, s.score, next(ranks) if s.kind == "passage" else None)
            for s in self.spans
            if s.kind in PASSAGES
        )


@dataclasses.dataclass(frozen=True)
class Budget:
    """A length in tokens, and the parts of a request that count; by default all.

    RULER does not count BOS. LongBench and InfiniteBench count the prompt without template and
    answer.
    """

    length: int
    new_tokens: int
    bos: bool = True
    prompt_only: bool = False  # the chat template and the new tokens do not count

    def used(self, prompt: Prompt) -> int:
        """Returns the number of tokens of `prompt` and its answer that count."""
        kinds = [*KINDS, "bos"] if self.bos else [*KINDS]
        if self.prompt_only:
            return prompt.tokens(*kinds)
        return prompt.tokens(*kinds, "template") + self.new_tokens

    def left(self, prompt: Prompt) -> int:
        """Returns the number of tokens that may be added; negative if `prompt` is too long."""
        return self.length - self.used(prompt)

    @property
    def counts(self) -> str:
        """The parts that count, for records, such as bos+template+prompt+answer_prefix+new."""
        bos, text = ["bos"] * self.bos, ["prompt", "answer_prefix"]
        return "+".join([*bos, *text] if self.prompt_only else [*bos, "template", *text, "new"])


def document_segments(instruction: str, document: str, question: str) -> list[Segment]:
    """Returns the segments of a prompt with one document, without empty parts."""
    texts = {"instruction": instruction, "context_doc": document, "question": question}
    return [Segment(kind, text) for kind, text in texts.items() if text]


class PromptEncoder:
    """Encodes segments for one tokenizer, with or without its chat template.

    With `chat` the answer prefix begins the assistant's message, and all other segments are the
    user's message. The prompt has one BOS if the model expects it, whether or not the template
    writes it.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "none"):
        self.tokenizer, self.template = tokenizer, template
        self.bos = start_token(tokenizer, "auto")

    def prompt(self, segments: Sequence[Segment]) -> Prompt:
        """Encodes `segments` in order, but answer prefixes last."""
        body = [s for s in segments if s.kind != "answer_prefix"]
        answer = [s for s in segments if s.kind == "answer_prefix"]
        if self.template == "none":
            return self._encode([*body, *answer])
        opening, closing = self._frame
        return self._encode([opening, *body, closing, *map(self._strip_answer, answer)])

    @property
    def fields(self) -> dict:
        """The fields of records about BOS and template."""
        fields = {
            "bos": "none" if self.bos is None else "document",
            "template": self.template,
        }
        if self.template == "chat":
            text = "".join(self._frame)
            fields["template_hash"] = hashlib.sha256(text.encode()).hexdigest()[:12]
        return fields

    @functools.cached_property
    def _frame(self) -> tuple[str, str]:
        """The chat template before the user's message and before the answer."""
        try:
            text = self.tokenizer.render_chat([{"role": "user", "content": _USER}])
        except InputError as error:
            raise InputError(
                f"tasks: template={self.template} needs a chat template ({error}); set"
                " tasks.N.template=none, or a model.tokenizer that has one"
            ) from None
        opening, _, closing = text.partition(_USER)
        return opening, closing

    def _strip_answer(self, answer: Segment) -> Segment:
        """Strips the leading blanks of the answer prefix if the template ends in a blank."""
        if answer.ids is None and self._frame[1][-1:].isspace():
            return dataclasses.replace(answer, text=answer.text.lstrip())
        return answer

    def _encode(self, pieces: Sequence[Segment | str]) -> Prompt:
        """Encodes segments, and parts of the template as strings."""
        ids: list[int] = []
        spans: list[Span] = []
        if self.bos is not None:
            ids, spans = [self.bos], [Span("bos", 0, 1)]
        blank = ""  # trailing blanks, which tokenizers attach to the next word
        for number, piece in enumerate(pieces):
            template = isinstance(piece, str)
            kind, start = "template" if template else piece.kind, len(ids)
            if not template and piece.ids is not None:
                if self.bos is not None and self.bos in piece.ids:
                    raise InputError(
                        f"segment {kind}: its ids hold BOS; encode it without specials"
                    )
                ids += [*self._piece(blank, not ids, False), *map(int, piece.ids)]
                blank = ""
            else:
                text = blank + (piece if template else piece.text)
                last = number == len(pieces) - 1
                stripped = text if last else text.rstrip(" ")
                blank = text[len(stripped) :]
                ids += self._piece(stripped, not spans or spans[-1].kind == "bos", template)
            if len(ids) > start:
                spans.append(Span(kind, start, len(ids), None if template else piece.score))
        return Prompt(np.asarray(ids, np.int32), tuple(spans))

    def _piece(self, text: str, first: bool, special: bool) -> list[int]:
        """Returns the token ids of a piece after the ones before it, without a template's BOS."""
        if not text:
            return []
        if not first:
            return encode_mid_text(self.tokenizer, text, allow_special=special)
        ids = list(self.tokenizer.encode(text, allow_special=special))
        return without_bos(ids, self.bos) if special else ids


def fit(prompt: Prompt, budget: Budget, tokenizer: Tokenizer, how: str, name: str = "") -> Prompt:
    """Truncates the documents and demonstrations of a prompt to fit a budget.

    Args:
      prompt: The prompt.
      budget: The maximum length.
      tokenizer: The tokenizer of the prompt, to remove partial characters at the cut.
      how: The end that is cut: middle keeps both ends equally, left keeps the end, right keeps the
        beginning, refuse cuts nothing.
      name: The name of the task, for the message.

    Raises:
      InputError: The other segments exceed the budget, or the prompt does and `how` is refuse.
    """
    over = -budget.left(prompt)
    if over <= 0:
        return prompt
    indices = np.concatenate([np.arange(*span) for span in prompt.movable] or [np.zeros(0, int)])
    if how == "refuse" or over > len(indices):
        fixed = budget.used(prompt) - (0 if how == "refuse" else len(indices))
        rest = "the prompt" if how == "refuse" else "instruction, question and answer"
        raise InputError(
            f"lengths: {budget.length} is too short for {name or 'this task'}, where {rest} and"
            f" what else counts ({budget.counts}) take {fixed} tokens; use at least {fixed}"
        )
    num_kept = len(indices) - over
    head = {"middle": num_kept - num_kept // 2, "left": 0, "right": num_kept}[how]
    tail = num_kept - head
    ids = prompt.ids[indices]
    head -= _num_partial(tokenizer, ids[:head], at_end=True)
    tail -= _num_partial(tokenizer, ids[len(ids) - tail :], at_end=False)
    return _without(prompt, indices[head : len(indices) - tail])


def _num_partial(tokenizer: Tokenizer, ids: np.ndarray, *, at_end: bool) -> int:
    """Returns the number of tokens at one end that are a partial character, at most three."""
    for count in range(min(4, len(ids) + 1)):
        rest = ids[: len(ids) - count] if at_end else ids[count:]
        text = tokenizer.decode(rest[-8:] if at_end else rest[:8])
        if not (text.endswith("\ufffd") if at_end else text.startswith("\ufffd")):
            return count
    return 0  # the text itself has U+FFFD


def _without(prompt: Prompt, indices: np.ndarray) -> Prompt:
    """Removes the tokens at `indices` and moves the spans."""
    keep = np.ones(len(prompt.ids), bool)
    keep[indices] = False
    new = np.concatenate([[0], np.cumsum(keep)])
    spans = [
        dataclasses.replace(span, start=int(new[span.start]), stop=int(new[span.stop]))
        for span in prompt.spans
    ]
    spans = [span for span in spans if span.stop > span.start]
    return Prompt(prompt.ids[keep], tuple(spans), len(indices))


def cut_text(tokenizer: Tokenizer, text: str, length: int) -> tuple[str, int]:
    """Truncates the middle of a whole prompt as text, as LongBench's pred.py does.

    As in that script, BOS counts, the text is tokenised again later and may then exceed `length`,
    and a character at the cut may become U+FFFD.

    Returns:
      The text, and the number of removed tokens.
    """
    ids = list(tokenizer.encode(text))
    bos = start_token(tokenizer, "auto")
    ids = ids if bos is None else [bos, *ids]
    if len(ids) <= length:
        return text, 0
    half = length // 2
    ends = (ids[:half], ids[len(ids) - half :])
    halves = [tokenizer.decode(part, skip_special=True) for part in ends]
    return "".join(halves), len(ids) - 2 * half
