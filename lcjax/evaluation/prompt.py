"""Prompts as typed segments: put together from token ids, counted against a budget, made shorter.

layout = Layout(tokenizer, "chat")
prompt = layout.prompt([
    Segment("instruction", "Read this.\n"), Segment("context_doc", text),
    Segment("question", "\nWho spoke?"), Segment("answer_prefix", "\nAnswer:"),
])
prompt = fit(prompt, Budget(4096, new_tokens=32), tokenizer, "middle")
prompt.ids, prompt.movable                # what is fed, and what may be read beside the decoder

Pieces are encoded one by one, each as it is inside a longer text, so that a length is known before
a prompt exists and a cut never moves what stands elsewhere. Segments begin with what separates
them from the one before.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from lcjax.checkpoints.tokenizer import Tokenizer, inside
from lcjax.errors import InputError, one_of
from lcjax.evaluation.corpus import start_token

KINDS = ("system", "instruction", "context_doc", "demo", "question", "answer_prefix")
SHRINKABLE = ("context_doc", "demo")  # may be cut, and may be read beside the decoder
TEMPLATES = ("none", "chat")
_SYSTEM, _USER = "@@lcjax-system@@", "@@lcjax-body@@"  # places of texts while a template is filled


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a prompt with a role. Text, or token ids that were made without specials."""

    kind: str
    text: str = ""
    ids: Sequence[int] | None = None

    def __post_init__(self):
        one_of("segment kind", self.kind, KINDS)


@dataclasses.dataclass(frozen=True)
class Span:
    """Where a segment stands among the ids; `kind` may also be bos or template."""

    kind: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids int32 [n] and what they are."""

    ids: np.ndarray
    spans: tuple[Span, ...]
    truncated: int = 0  # tokens that were cut out

    def tokens(self, *kinds: str) -> int:
        """Tokens of these kinds."""
        return sum(span.stop - span.start for span in self.spans if span.kind in kinds)

    def start(self, kind: str) -> int:
        """Where the first segment of a kind begins."""
        return next(span.start for span in self.spans if span.kind == kind)

    @property
    def movable(self) -> tuple[tuple[int, int], ...]:
        """First and end of every segment that may be read beside the decoder, in order."""
        return tuple((s.start, s.stop) for s in self.spans if s.kind in SHRINKABLE)


@dataclasses.dataclass(frozen=True)
class Budget:
    """A length, and what of a request it counts: by default everything.

    RULER leaves out BOS, LongBench all but the text, InfiniteBench the new tokens.
    """

    length: int
    new_tokens: int
    bos: bool = True
    template: bool = True
    answer_prefix: bool = True
    new: bool = True

    def used(self, prompt: Prompt) -> int:
        """Tokens of `prompt` and its answer that count."""
        kinds = set(KINDS) - {"answer_prefix"}
        kinds |= {kind for kind in ("bos", "template", "answer_prefix") if getattr(self, kind)}
        return prompt.tokens(*kinds) + self.new_tokens * self.new

    def left(self, prompt: Prompt) -> int:
        """Tokens that may be added; negative where `prompt` is too long."""
        return self.length - self.used(prompt)

    @property
    def counts(self) -> str:
        """What counts, for records: such as bos+template+prompt+answer_prefix+new."""
        names = ("bos", "template", "prompt", "answer_prefix", "new")
        return "+".join(name for name in names if getattr(self, name, True))


class Layout:
    """Turns segments into token ids for one tokenizer, with or without its chat template.

    With `chat` the system segment has its own turn where the template knows one, everything up to
    the answer prefix is the user's, and the answer prefix begins the assistant's. There is one BOS
    if the model expects one, whether or not the template writes it.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "none"):
        self.tokenizer, self.template = tokenizer, template
        self.bos = start_token(tokenizer, "auto")
        self._frames: dict[bool, tuple[str, str, str]] = {}  # by whether there is a system

    def prompt(self, segments: Sequence[Segment]) -> Prompt:
        """`segments` in their order, the system first and the answer prefix last."""
        by_kind = {kind: [s for s in segments if s.kind == kind] for kind in KINDS}
        system, answer = by_kind["system"], by_kind["answer_prefix"]
        body = [s for s in segments if s.kind not in ("system", "answer_prefix")]
        if self.template == "none":
            return self._encoded([*system, *body, *answer])
        opening, between, closing = self._frame(bool(system))
        turns = [opening, *system, between, *body, closing]
        return self._encoded([*turns, *map(self._unspaced, answer)])

    @property
    def facts(self) -> dict:
        """What records say about how prompts are put together."""
        facts = {
            "bos": "none" if self.bos is None else "document",
            "template": self.template,
        }
        if self.template == "chat":
            text = "".join(self._frame(False))
            facts["template_hash"] = hashlib.sha256(text.encode()).hexdigest()[:12]
        return facts

    def _frame(self, system: bool) -> tuple[str, str, str]:
        """What the template writes before the system's, before the user's and before the answer."""
        if system not in self._frames:
            self._frames[system] = self._rendered(system)
        return self._frames[system]

    def _rendered(self, system: bool) -> tuple[str, str, str]:
        user = {"role": "user", "content": _USER}
        render = self.tokenizer.render_chat
        if system:
            try:
                text = render([{"role": "system", "content": _SYSTEM}, user])
            except InputError:  # such as Gemma's, which knows no system
                text = ""
            if _SYSTEM in text and text.index(_SYSTEM) < text.index(_USER):
                opening, _, rest = text.partition(_SYSTEM)
                between, _, closing = rest.partition(_USER)
                return opening, between, closing
        opening, _, closing = render([user]).partition(_USER)
        return opening, "\n\n" if system else "", closing

    def _unspaced(self, answer: Segment) -> Segment:
        """The answer's beginning without blanks in front where the template ends in one."""
        if answer.ids is None and self._frame(False)[2][-1:].isspace():
            return dataclasses.replace(answer, text=answer.text.lstrip())
        return answer

    def _encoded(self, pieces: Sequence[Segment | str]) -> Prompt:
        """Segments and, as strings, parts of the template."""
        ids: list[int] = []
        spans: list[Span] = []
        if self.bos is not None:
            ids, spans = [self.bos], [Span("bos", 0, 1)]
        blank = ""  # blanks at the end of a piece: words have them in front
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
                bare = text if last else text.rstrip(" ")
                blank = text[len(bare) :]
                ids += self._piece(bare, not spans or spans[-1].kind == "bos", template)
            if len(ids) > start:
                spans.append(Span(kind, start, len(ids)))
        return Prompt(np.asarray(ids, np.int32), tuple(spans))

    def _piece(self, text: str, first: bool, special: bool) -> list[int]:
        """Ids of one piece behind those before it; BOS that a template writes is left out."""
        if not text:
            return []
        if not first:
            return _behind(self.tokenizer, text, special)
        ids = list(self.tokenizer.encode(text, allow_special=special))
        if special and self.bos is not None and self.bos in ids[:2]:
            ids = ids[ids.index(self.bos) + 1 :]  # perhaps behind sentencepiece's blank
        return ids


def _behind(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    """Ids of `text` inside a longer text, where it may begin with a letter."""
    if text[0].isalnum():
        # Behind a letter it would go on with that word; a line's end joins with no word.
        anchor = list(tokenizer.encode("\n"))
        ids = list(tokenizer.encode("\n" + text, allow_special=special))
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
    return inside(tokenizer, text, allow_special=special)


def fit(prompt: Prompt, budget: Budget, tokenizer: Tokenizer, how: str, name: str = "") -> Prompt:
    """`prompt` within `budget`: tokens of its documents and demonstrations are cut out.

    `how` is middle, which keeps as much of their beginning as of their end; left, which keeps the
    end; right, which keeps the beginning; or refuse. Half a character is never kept. `name` is that
    of the task, for the error about a budget that the other segments exceed.
    """
    over = -budget.left(prompt)
    if over <= 0:
        return prompt
    places = np.concatenate([np.arange(*span) for span in prompt.movable] or [np.zeros(0, int)])
    if how == "refuse" or over > len(places):
        fixed = budget.used(prompt) - (0 if how == "refuse" else len(places))
        rest = "the prompt" if how == "refuse" else "instruction, question and answer"
        raise InputError(
            f"lengths: {budget.length} is too short for {name or 'this task'}, where {rest} and"
            f" what else counts ({budget.counts}) take {fixed} tokens; use at least {fixed}"
        )
    kept = len(places) - over
    head = {"middle": kept - kept // 2, "left": 0, "right": kept}[how]
    tail = kept - head
    ids = prompt.ids[places]
    head -= _halves(tokenizer, ids[:head], at_end=True)
    tail -= _halves(tokenizer, ids[len(ids) - tail :], at_end=False)
    return _without(prompt, places[head : len(places) - tail])


def _halves(tokenizer: Tokenizer, ids: np.ndarray, *, at_end: bool) -> int:
    """Tokens at one end that are a part of a character: at most three, as UTF-8 has it."""
    for count in range(min(4, len(ids) + 1)):
        rest = ids[: len(ids) - count] if at_end else ids[count:]
        text = tokenizer.decode(rest[-8:] if at_end else rest[:8])
        if not (text.endswith("\ufffd") if at_end else text.startswith("\ufffd")):
            return count
    return 0  # the text itself says U+FFFD


def _without(prompt: Prompt, places: np.ndarray) -> Prompt:
    """`prompt` without the ids at `places`, and its spans moved up."""
    keep = np.ones(len(prompt.ids), bool)
    keep[places] = False
    before = np.concatenate([[0], np.cumsum(keep)])
    spans = [Span(s.kind, int(before[s.start]), int(before[s.stop])) for s in prompt.spans]
    spans = [span for span in spans if span.stop > span.start]
    return Prompt(prompt.ids[keep], tuple(spans), len(places))


def cut_text(tokenizer: Tokenizer, text: str, length: int) -> tuple[str, int]:
    """LongBench's own cut (its pred.py): of a whole prompt both halves as text, and what it lost.

    For parity: BOS counts, the text is tokenised again later and may then be longer than `length`,
    instruction and question lie in the halves, and a character at the cut may become U+FFFD.
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
