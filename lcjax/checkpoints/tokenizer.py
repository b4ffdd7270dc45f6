"""Defines the protocol of tokenizers, and its implementations.

`encode` adds no special tokens and reads none: "<|im_end|>" typed by a user becomes ordinary
tokens, so a document cannot end a turn. `encode_chat` reads the special tokens that the chat
template writes. Only with `allow_special=True` do all strings of special tokens become special
tokens.
`lcjax.checkpoints.tokenizer_files` builds the tokenizers of folders and GGUF files.
"""

import abc
import contextlib
import dataclasses
import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lcjax.checkpoints import chat
from lcjax.checkpoints.chat import ChatTokens, Message, Span
from lcjax.checkpoints.chat_template import Rendered, render_template
from lcjax.errors import INT32_MAX, InputError, check_flags, import_package, one_line
from lcjax.files import write_hf_json
from lcjax.storage import to_path

GENERATION = "generation_config.json"
# The files of `save`
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", GENERATION)
_SPECIAL = ("<s>", "</s>", "<pad>")  # of `ByteTokenizer`
_BYTES = 256
# Appended to a sentencepiece model: `normalizer_spec { add_dummy_prefix: false }`.
NO_PREFIX = b"\x1a\x02\x18\x00"
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")  # of `AddedToken`
_NO_FLAGS: dict[str, Any] = dict.fromkeys(_FLAGS, False)
# What `clean_up_tokenization_spaces` of transformers replaces, in this order.
_CLEAN_UP = {f" {end}": end for end in (".", "?", "!", ",")} | {" ' ": "'"}
_CLEAN_UP |= {f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")}
_CLEAN_UP_KEYS = (  # the second one is needed for BPE
    "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
)
# Text that pre-tokenizers split differently: digits, spaces, newlines, case, contractions, accents
# in two normal forms, other scripts, characters outside a vocabulary, code.
_PROBE = (
    "Hello world's 1234567890 3.14\t  tabs\r\n\n\nHE'LL we've don't naïve nai\u0308ve ﬁ Ⅳ "
    "日本語のテキスト Привет мир مرحبا हिन्दी 🙂👩\u200d👩\u200d👧 \u0000\x7f"
    "   def f(x, *y):\n        return x**2 != {'a': [1, 22, 333]}  # --- end\n"
)


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of tokenizers that the rest of the library uses."""

    bos_id: int | None
    eos_ids: tuple[int, ...]  # tokens that end an answer; the first one ends a document
    pad_id: int | None
    add_bos: bool  # whether the model expects `bos_id` before a text; `encode` never adds it
    vocab_size: int  # highest id + 1

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers with equal ids, whichever file they came from."""
        ...

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...

    def spans(self, text: str) -> list[Span]:
        """Returns the character range (start, end) of every token of `encode(text)`.

        If several tokens are parts of one character, each has the character's range, or some have
        an empty range.
        """
        ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str: ...

    def render_chat(
        self, messages: list[Message], /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns a conversation in the chat format of the model.

        Args:
          messages: dictionaries with `role` and `content`, and other keys that the template reads
            (`tool_calls`, `reasoning_content`).
          add_generation_prompt: whether the beginning of an answer follows the messages.
          **variables: other variables of the template: `enable_thinking`, `tools`, `documents`.
        """
        ...

    def encode_chat(
        self,
        messages: list[Message],
        /,
        add_generation_prompt: bool = True,
        *,
        allow_special: bool = False,
        **variables: Any,
    ) -> ChatTokens:
        """Returns the text of `render_chat` with its ids.

        Special tokens in messages and variables are text. With `allow_special` they are special
        tokens, as in transformers.
        """
        ...

    def save(self, folder: str | Path) -> None:
        """Writes some of `TOKENIZER_FILES`: folders with other files are never replaced."""
        ...


@dataclasses.dataclass(frozen=True)
class Specials:
    """Ids of the special tokens, and the chat template."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    unk_id: int | None = None
    # One template, or several by their names, of which transformers uses `tool_use` if there are
    # tools, else `default`.
    chat_template: str | dict[str, str] | None = None
    add_bos: bool = False
    max_length: int | None = None
    # Strings of the tokens that a folder names (`bos_token`, `image_token`); None: those of the ids
    names: dict[str, str] | None = None

    def strings(self, token: Callable[[int], str | None]) -> dict[str, str]:
        """Returns the tokens' strings by the names of transformers' configs: `bos_token`, ..."""
        if self.names is not None:
            return self.names
        eos = self.eos_ids[0] if self.eos_ids else None
        ids = {"bos": self.bos_id, "eos": eos, "pad": self.pad_id, "unk": self.unk_id}
        texts = {f"{name}_token": token(i) for name, i in ids.items() if i is not None}
        return {name: text for name, text in texts.items() if text is not None}

    def template(self, tools: Any) -> str | None:
        """Returns the template of a conversation with these `tools` (None: without tools)."""
        if not isinstance(self.chat_template, dict):
            return self.chat_template
        name = "tool_use" if tools is not None and "tool_use" in self.chat_template else "default"
        if name not in self.chat_template:
            raise InputError(
                f"chat_template: the tokenizer has only templates named"
                f" {', '.join(sorted(self.chat_template))}; name one of them default"
            )
        return self.chat_template[name]

    def settings(self, token: Callable[[int], str | None]) -> dict[str, Any]:
        """Returns the keys of `tokenizer_config.json` that all kinds of tokenizers have."""
        settings: dict[str, Any] = dataclasses.replace(self, names=None).strings(token)
        if self.names is not None:
            if not self.add_bos:  # a folder may not name the BOS of the model's configs
                settings.pop("bos_token", None)
            settings |= self.names
        settings["add_bos_token"] = self.add_bos
        if self.max_length:
            settings["model_max_length"] = self.max_length
        if isinstance(self.chat_template, dict):
            named = [{"name": k, "template": text} for k, text in self.chat_template.items()]
            settings["chat_template"] = named
        elif self.chat_template:
            settings["chat_template"] = self.chat_template
        return settings


class Encoded(NamedTuple):
    """The token ids of a text, and the characters that each token covers."""

    ids: list[int]
    spans: list[Span]


class _ChatTokenizer(abc.ABC):
    """Base class of tokenizers: encodes conversations."""

    @property
    @abc.abstractmethod
    def _special_pattern(self) -> re.Pattern | None:
        """A pattern that finds the strings of special tokens; None if there are none."""

    @abc.abstractmethod
    def _render(
        self, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any]
    ) -> Rendered: ...

    @abc.abstractmethod
    def _encode_rendered(self, text: str, literal: Sequence[int]) -> Encoded:
        """Returns the ids of a text with special tokens, and the span of each.

        No special token has one of the characters `literal`.
        """

    @abc.abstractmethod
    def token(self, index: int) -> str | None:
        """Returns the string of a token."""

    def render_chat(
        self, messages: list[Message], /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        check_flags(add_generation_prompt=add_generation_prompt)
        return self._render(messages, add_generation_prompt, variables).text

    def encode_chat(
        self,
        messages: list[Message],
        /,
        add_generation_prompt: bool = True,
        *,
        allow_special: bool = False,
        **variables: Any,
    ) -> ChatTokens:
        def render(values: tuple[list[Message], dict[str, Any]]) -> str:
            return self._render(values[0], add_generation_prompt, values[1] | strings).text

        check_flags(add_generation_prompt=add_generation_prompt, allow_special=allow_special)
        rendered, literal = self._render(messages, add_generation_prompt, variables), []
        check_text(rendered.text)
        if not allow_special:
            # The caller may rename special tokens, as in transformers, so these are no typed text.
            strings = {k: v for k, v in variables.items() if k.endswith("_token")}
            typed = {k: v for k, v in variables.items() if k not in strings}
            ends = [self.token(i) for i in (self.bos_id, *self.eos_ids) if i is not None]
            literal = chat.typed_specials(
                rendered.text, render, (messages, typed), self._special_pattern, ends
            )
        ids, spans = self._encode_rendered(rendered.text, literal)
        return ChatTokens(rendered.text, ids, spans, rendered.generated)


class _PublishedTokenizer(_ChatTokenizer):
    """Base class of tokenizers that come with a checkpoint: special tokens and chat template."""

    def __init__(self, specials: Specials):
        self._specials = specials
        self.bos_id = specials.bos_id
        self.eos_ids = specials.eos_ids
        self.pad_id = specials.pad_id
        self.unk_id = specials.unk_id
        self.add_bos = specials.add_bos
        # The model's generation_config.json: sampling defaults, and its id of BOS if it states one.
        self.generation: dict[str, Any] = {}

    def _render(
        self, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any]
    ) -> Rendered:
        check_messages(messages)
        # As in transformers, a variable may replace the string of a special token.
        variables = self._specials.strings(self.token) | variables
        return render_template(
            self._specials.template(variables.get("tools")),
            messages,
            **variables | {"add_generation_prompt": add_generation_prompt},
        )

    def _save(self, folder: str | Path, name: str, content: bytes, settings: dict) -> None:
        """Writes `name` and `tokenizer_config.json`, which `AutoTokenizer` opens."""
        folder = to_path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        write_hf_json(folder / "tokenizer_config.json", settings)
        if self.generation or len(self.eos_ids) > 1:
            write_hf_json(folder / GENERATION, generation_config(self))


class JsonTokenizer(_PublishedTokenizer):
    """A tokenizer of the `tokenizers` package: `tokenizer.json`, or built from GGUF metadata."""

    def __init__(
        self,
        backend: Any,
        specials: Specials,
        *,
        settings: dict[str, Any] | None = None,
        where: str = "tokenizer.json",
    ):
        """Wraps `backend`.

        Args:
          backend: a `tokenizers.Tokenizer`.
          specials: its special tokens; with `add_bos`, `save` writes a post-processor that adds
            BOS, because transformers asks nothing else.
          settings: its `tokenizer_config.json`, which `save` writes again.
          where: the file's name in errors.
        """
        super().__init__(specials)
        self._where = where
        backend.no_truncation()
        backend.no_padding()
        if specials.add_bos and specials.bos_id is not None:
            _add_bos(backend, specials.bos_id)
        self._json = backend.to_str()
        self._settings = settings or {}
        self._splits_special = bool(self._settings.get("split_special_tokens"))
        keys = _CLEAN_UP_KEYS[: 1 + (type(backend.model).__name__ == "BPE")]
        self._cleans_up = all(self._settings.get(key) for key in keys)
        self._backends: dict[str, Any] = {}
        # Ids may have gaps: the model needs a row for the highest one.
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __getstate__(self) -> dict[str, Any]:
        # Pickling loses a backend's `encode_special_tokens`, so worker processes build new ones.
        return self.__dict__ | {"_backends": {}}

    def _backend(self, special: str) -> Any:
        """Returns the tokenizer that finds special tokens by their string, by an alias or never."""
        if special not in self._backends:
            from tokenizers import Tokenizer as Backend

            text = self._json
            backend = Backend.from_str(self._aliased() if special == "alias" else text)
            backend.encode_special_tokens = special == "never"
            # Models other than BPE may find the string of a special token in their vocabulary.
            model = backend.model
            if special == "never" and (type(model).__name__ != "BPE" or model.ignore_merges):
                backend = self._backend("alias")
            self._backends[special] = backend
        return self._backends[special]

    def _aliased(self) -> str:
        """Returns the JSON with other names for special tokens, which no text contains."""
        values = json.loads(self._json)
        model, names = values["model"], self._aliases
        normalizer = self._backend("string").normalizer
        normalize = str if normalizer is None else normalizer.normalize_str
        for token in values["added_tokens"]:
            if alias := names.get(token["content"]):
                token["content"] = alias
                # Some normalizers remove its characters.
                token["normalized"] &= alias in normalize(alias)
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token"):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
            model["merges"] = [p for p in pairs if names.keys().isdisjoint((*p, "".join(p)))]
        return json.dumps(values, ensure_ascii=False)

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        added = self._backend("string").get_added_tokens_decoder().items()
        return {i: token.content for i, token in added if token.special and token.content}

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return chat.aliases([*self._special_tokens.values()])

    @cached_property
    def _special_pattern(self) -> re.Pattern | None:
        return chat.special_pattern(self._special_tokens.values())

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._backend("string").get_vocab(with_added_tokens=True), self.encode)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        check_text(text)
        allow_special = allow_special and not self._splits_special
        return self._encoding("string" if allow_special else "never", text).ids

    def spans(self, text: str) -> list[Span]:
        check_text(text)
        return self._encoding("never", text).offsets

    def _encoding(self, special: str, text: str) -> Any:
        """Encodes a text; other threads run while a long one is encoded, as `encode` prevents."""
        with backend_errors(self._where):
            backend = self._backend(special)
            if len(text) < 10_000:
                return backend.encode(text, add_special_tokens=False)
            return backend.encode_batch([text], add_special_tokens=False)[0]

    def _encode_rendered(self, text: str, literal: Sequence[int]) -> Encoded:
        encoding = self._encoding("never" if self._splits_special else "string", text)
        if not literal or self._splits_special:
            return Encoded(encoding.ids, encoding.offsets)
        specials = self._specials_in(text, encoding)
        for start, string in list(specials.items()):
            if any(start <= i < start + len(string) for i in literal):
                del specials[start]
        text = chat.with_aliases(text, specials, self._aliases)
        encoding = self._encoding("alias", text)
        if len(self._specials_in(text, encoding, self._aliases)) < len(specials):
            raise InputError(
                "a message holds the string of a special token, which this tokenizer cannot tell"
                " from its own; remove it, or set allow_special"
            )
        return Encoded(encoding.ids, encoding.offsets)

    def _specials_in(
        self, text: str, encoding: Any, names: Mapping[str, str] | None = None
    ) -> dict[int, str]:
        """Maps the first character of each special token to its string, or to its alias."""
        strings = {}
        for index, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            string = self._special_tokens.get(index)
            if string is not None:
                string = string if names is None else names[string]
                # A token may cover the blanks around its string; that of unknown text has another.
                if (first := text.find(string, start, stop)) >= 0:
                    strings[first] = string
        return strings

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        ids = _id_list(ids, skip_special)
        with backend_errors(self._where):
            text = self._backend("string").decode(ids, skip_special_tokens=skip_special)
        for old, new in _CLEAN_UP.items() if self._cleans_up else ():
            text = text.replace(old, new)
        return text

    def token(self, index: int) -> str | None:
        return self._backend("string").id_to_token(index)

    def save(self, folder: str | Path) -> None:
        # Of other classes, transformers 5 replaces the normalizer and pre-tokenizer of the file.
        settings = self._settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
        self._save(
            folder,
            "tokenizer.json",
            self._json.encode(),
            settings | self._specials.settings(self.token),
        )


def _id_list(ids: Iterable[int], skip_special: bool) -> list[int]:
    """Returns the ids that `decode` takes; raises an InputError unless they are ids, and a flag."""
    check_flags(skip_special=skip_special)
    try:
        ids = list(map(operator.index, ids))
    except TypeError:
        ids = [-1]
    if ids and not 0 <= min(ids) <= max(ids) <= INT32_MAX:
        raise InputError("ids must be token ids, whole numbers: lm.tokenizer.decode([1, 2])")
    return ids


def _add_bos(backend: Any, bos_id: int) -> None:
    """Makes `backend` put BOS before a text if special tokens are asked for."""
    from tokenizers import processors

    if backend.encode("a", add_special_tokens=True).ids[:1] == [bos_id]:
        return
    bos = backend.id_to_token(bos_id)
    backend.post_processor = processors.TemplateProcessing(
        single=["$A"] if bos is None else [bos, "$A"],
        pair=["$A", "$B"] if bos is None else [bos, "$A", bos, "$B"],
        special_tokens=[] if bos is None else [(bos, bos_id)],
    )


@contextlib.contextmanager
def backend_errors(where: str) -> Iterator[None]:
    """Turns errors of the package `tokenizers` into an InputError that begins with `where`.

    The package raises nothing narrower than an Exception, and a BaseException when Rust panics.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{where}: not a readable tokenizer, truncated or damaged ({one_line(error)});"
            " download it again"
        ) from None


class SentencePieceTokenizer(_PublishedTokenizer):
    """A sentencepiece model, with tokens that were added to it (`<pad>` beyond its vocabulary).

    Ordinary text is encoded by sentencepiece, with the model's normaliser, as in Meta's Llama
    reference; no control token is read from it. Added tokens that are not special are read from
    every text, and special ones with `allow_special`. Each part between them is encoded as a
    separate text, which begins with sentencepiece's prefix space, or without `legacy` as a
    continuation of the text before it.
    """

    def __init__(
        self,
        model: bytes,
        specials: Specials | None = None,
        *,
        added: Mapping[int, Mapping[str, Any]] | None = None,
        settings: dict[str, Any] | None = None,
        legacy: bool = True,
        where: str = "tokenizer.model",
    ):
        """Opens a model.

        Args:
          model: the content of `tokenizer.model`.
          specials: its special tokens; None: those that the model names.
          added: tokens by their ids, as in `added_tokens_decoder` of `tokenizer_config.json`:
            "content", and the flags of `tokenizers.AddedToken`.
          settings: its `tokenizer_config.json`, which `save` writes again.
          legacy: whether a prefix space precedes text after special tokens, or only at the start.
          where: the file's name in errors.
        """
        self._model = model
        self._loaded: dict[Any, Any] = {}
        processor = self._processor(where=where)
        super().__init__(specials or _specials_of(processor))
        self._settings, self._legacy = settings, legacy
        self._splits_special = bool((settings or {}).get("split_special_tokens"))
        pieces = range(processor.get_piece_size())
        self._tokens: dict[int, dict[str, Any]] = {
            i: _NO_FLAGS | {"special": True, "content": processor.id_to_piece(i)}
            for i in pieces
            if processor.is_control(i) or i == self.unk_id
        }
        self._tokens |= {i: _NO_FLAGS | token for i, token in (added or {}).items()}
        self.special_ids = {token["content"]: i for i, token in self._tokens.items()}
        self.vocab_size = max([len(pieces), *(i + 1 for i in self._tokens)])
        # A piece with a text: ids that follow it are decoded as the continuation of a text.
        names = (processor.id_to_piece(i) for i in pieces if i not in self._tokens)
        self._anchor = next((p for p in names if p.isalnum() and not p.startswith("▁")), None)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": {}}  # worker processes open the model again

    def _processor(self, *, prefix: bool = True, where: str = "tokenizer.model") -> Any:
        """Returns the model; without `prefix`, it puts no space before a text."""
        if prefix not in self._loaded:
            # Of two normaliser messages, protocol buffers merge the fields.
            model = self._model if prefix else self._model + NO_PREFIX
            self._loaded[prefix] = _processor(model, where)
        return self._loaded[prefix]

    @cached_property
    def fingerprint(self) -> str:
        processor = self._processor()
        vocab = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
        return fingerprint(vocab | self.special_ids, self.encode)

    def _matcher(self, special: str) -> Any:
        """Returns what finds added tokens, of special ones their string, an alias or none.

        It is a `tokenizers.Tokenizer` in which other parts of a text are "", or None if there are
        no tokens to be found.
        """
        if (key := f"matcher {special}") not in self._loaded:
            tokens = [t for t in self._tokens.values() if special != "never" or not t["special"]]
            names = self._aliases if special == "alias" else {}
            self._loaded[key] = _matcher(
                token | {"content": names.get(token["content"], token["content"])}
                for token in tokens
            )
        return self._loaded[key]

    def _encode(self, text: str, special: str, aliased: str | None = None) -> Encoded:
        """Returns ids and spans of a text; `aliased` is the text with aliases for tokens."""
        ids, spans = [], []
        matches = [(0, (0, len(text)))]
        if (matcher := self._matcher(special)) is not None:
            encoding = matcher.encode(text if aliased is None else aliased)
            matches = zip(encoding.ids, encoding.offsets)
        for match, (start, end) in matches:
            if match:
                name = matcher.id_to_token(match)
                ids.append(self.special_ids[self._names.get(name, name)])
                spans.append((start, end))
                continue
            part = text[start:end]
            processor = self._processor(prefix=self._legacy or start == 0)
            pieces = processor.encode(part, out_type="proto").pieces
            ids += [piece.id for piece in pieces]
            # sentencepiece counts bytes; a character's first byte does not begin with bits 10.
            is_first = (byte & 0xC0 != 0x80 for byte in part.encode())
            characters = list(accumulate(is_first, initial=start))  # before each byte
            spans += [(characters[piece.begin], characters[piece.end]) for piece in pieces]
        return Encoded(ids, spans)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        check_text(text)
        special = "string" if allow_special and not self._splits_special else "never"
        if not self._matcher(special):
            return self._processor().encode(text)
        return self._encode(text, special).ids

    @cached_property
    def _special_pattern(self) -> re.Pattern | None:
        return chat.special_pattern(self._aliases)

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return chat.aliases([t["content"] for t in self._tokens.values() if t["special"]])

    @cached_property
    def _names(self) -> dict[str, str]:
        return {alias: name for name, alias in self._aliases.items()}

    def _encode_rendered(self, text: str, literal: Sequence[int]) -> Encoded:
        if not literal or self._splits_special:
            return self._encode(text, "never" if self._splits_special else "string")
        matches = chat.find_specials(self._special_pattern, text, literal)
        specials = {match.start(): match.group() for match in matches}
        return self._encode(text, "alias", chat.with_aliases(text, specials, self._aliases))

    def spans(self, text: str) -> list[Span]:
        check_text(text)
        return self._encode(text, "never").spans

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Returns the text of `ids`; only the very first word loses its prefix space.

        Special tokens are left out with `skip_special`, which joins what they separate.
        """
        size = self._processor().get_piece_size()
        parts: list[str] = []
        run: list[int] = []
        for index in _id_list(ids, skip_special):
            token = self._tokens.get(index)
            if token is None:
                run += [index] * (index < size)  # rows that only pad the embedding have no text
            elif not (skip_special and token["special"]):
                parts += [self._decode(run, bool(parts)), token["content"]]
                run = []
        return "".join([*parts, self._decode(run, bool(parts))])

    def _decode(self, run: list[int], continues: bool) -> str:
        processor = self._processor()
        if not continues or self._anchor is None:
            return processor.decode(run)
        text = processor.decode([processor.piece_to_id(self._anchor), *run])
        return text[len(self._anchor) :]

    def find(self, piece: str) -> int | None:
        """Returns the id of a piece of the model."""
        processor = self._processor()
        index = processor.piece_to_id(piece)
        return index if processor.id_to_piece(index) == piece else None

    def token(self, index: int) -> str | None:
        token = self._tokens.get(index)
        return self._processor().id_to_piece(index) if token is None else token["content"]

    def save(self, folder: str | Path) -> None:
        settings = self._settings
        if settings is None:
            prefix = self._processor().encode("a") != self._processor(prefix=False).encode("a")
            settings = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": prefix}
        settings = settings | self._specials.settings(self.token)
        settings |= {
            "add_eos_token": False,
            "legacy": self._legacy,
            "added_tokens_decoder": {str(i): token for i, token in self._tokens.items()},
        }
        self._save(folder, "tokenizer.model", self._model, settings)


def _matcher(tokens: Iterable[Mapping[str, Any]]) -> Any:
    from tokenizers import AddedToken, Tokenizer, models

    if not (tokens := list(tokens)):
        return None
    matcher = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    matcher.add_tokens([AddedToken(**token) for token in tokens])
    return matcher


def _specials_of(processor: Any) -> Specials:
    """Returns the special tokens of a sentencepiece model; it gives the id -1 for none."""
    names = ("bos_id", "pad_id", "unk_id")
    ids = {name: index for name in names if (index := getattr(processor, name)()) >= 0}
    ends = tuple(i for i in [processor.eos_id()] if i >= 0)
    return Specials(eos_ids=ends, add_bos="bos_id" in ids, **ids)


def _processor(model: bytes, where: str) -> Any:
    sentencepiece = import_package("sentencepiece", where)
    if not model.removesuffix(NO_PREFIX):  # which sentencepiece accepts
        raise InputError(f"{where} is empty; download it again")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, OSError) as error:
        raise InputError(
            f"{where}: not a sentencepiece model, or truncated ({one_line(error)})"
        ) from error


class ByteTokenizer(_ChatTokenizer):
    """A tokenizer of UTF-8 bytes for tests and demonstrations; 256 is BOS, 257 EOS, 258 padding."""

    bos_id = _BYTES
    eos_ids = (_BYTES + 1,)
    pad_id = _BYTES + 2
    add_bos = True
    vocab_size = _BYTES + len(_SPECIAL)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.vocabulary(), self.encode)

    @staticmethod
    def vocabulary() -> dict[str, int]:
        """Returns the ids of the tokens' strings in the tokenizer.json that `save` writes."""
        return _byte_vocabulary() | {name: _BYTES + i for i, name in enumerate(_SPECIAL)}

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        check_text(text)
        return self._encode_rendered(text, ()).ids if allow_special else list(text.encode())

    @property
    def _special_pattern(self) -> re.Pattern | None:
        return chat.special_pattern(_SPECIAL)

    def _encode_rendered(self, text: str, literal: Sequence[int]) -> Encoded:
        specials = chat.find_specials(self._special_pattern, text, literal)
        ids = {name: _BYTES + i for i, name in enumerate(_SPECIAL)}
        return _encode_parts(self, text, specials, ids)

    def spans(self, text: str) -> list[Span]:
        check_text(text)
        return [(i, i + 1) for i, char in enumerate(text) for _ in char.encode()]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        out = bytearray()
        for index in _id_list(ids, skip_special):
            if index >= self.vocab_size:
                raise InputError(f"id={index} must be below {self.vocab_size} (bytes and specials)")
            if index < _BYTES:
                out.append(index)
            elif not skip_special:
                out += _SPECIAL[index - _BYTES].encode()
        return out.decode("utf-8", "replace")

    def token(self, index: int) -> str | None:
        return _SPECIAL[index - _BYTES] if index >= _BYTES else chr(index)

    def _render(
        self, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any]
    ) -> Rendered:
        """Returns a conversation as lines of `role: content`; variables are ignored."""
        check_messages(messages)
        turns = [f"{m['role']}: {m.get('content') or ''}\n" for m in messages]
        return Rendered("".join(turns) + ("assistant: " if add_generation_prompt else ""), ())

    def save(self, folder: str | Path) -> None:
        """Writes the same tokenizer as `tokenizer.json`: byte-level BPE without merges."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        backend = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(list(_SPECIAL))
        specials = Specials(self.bos_id, self.eos_ids, self.pad_id, add_bos=True)
        JsonTokenizer(backend, specials).save(folder)


def _encode_parts(
    tokenizer: Tokenizer, text: str, specials: Iterable[re.Match], special_ids: Mapping[str, int]
) -> Encoded:
    """Returns ids and spans of a text; each part between special tokens is a text of its own."""
    ids, spans, start = [], [], 0
    for match in [*specials, None]:
        part = text[start : match.start() if match else len(text)]
        ids += tokenizer.encode(part)
        spans += [(start + first, start + last) for first, last in tokenizer.spans(part)]
        if match:
            ids.append(special_ids[match.group()])
            spans.append(match.span())
            start = match.end()
    return Encoded(ids, spans)


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the special token ids with transformers' keys."""
    ends = list(tokenizer.eos_ids)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.pad_id,
    }
    stated = getattr(tokenizer, "generation", {})  # may state that the model has no BOS
    return ids | {key: stated[key] for key in ids if key in stated}


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the contents of `generation_config.json` for a model with this tokenizer."""
    return getattr(tokenizer, "generation", {}) | token_ids(tokenizer)


def check_text(text: str) -> None:
    """Raises an InputError unless `text` is a string that UTF-8 can hold."""
    if not isinstance(text, str):
        raise InputError(f"text={text!r:.40} must be a string")
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        surrogate = ascii(text[error.start])
        raise InputError(
            f"text has the lone surrogate {surrogate} at character {error.start}, which UTF-8"
            " cannot hold; remove it"
        ) from None


def check_messages(messages: list[Message]) -> None:
    """Raises an InputError unless `messages` are dictionaries with role and content as text.

    The content of a message with `tool_calls` may be absent or None.
    """
    is_list = isinstance(messages, list | tuple) and messages
    if not is_list or not all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (
            isinstance(content := message.get("content"), str)
            or (content is None and message.get("tool_calls"))
        )
        for message in messages
    ):
        raise InputError(
            f"messages={messages!r:.60} must be a question, or a list of messages such as"
            ' {"role": "user", "content": "..."}'
        )


def check_template_variables(variables: Any) -> dict[str, Any]:
    """Returns `chat_template_kwargs` as a dictionary; raises an InputError for other values."""
    variables = {} if variables is None else variables
    reserved = (
        "messages", "add_generation_prompt", "chat_template", "tokenize", "allow_special",
    )  # fmt: skip
    if not isinstance(variables, Mapping) or any(not isinstance(name, str) for name in variables):
        raise InputError(
            f"chat_template_kwargs={variables!r:.60} must map names of variables to values, such as"
            ' {"enable_thinking": false}'
        )
    if wrong := [name for name in reserved if name in variables]:
        raise InputError(
            f"chat_template_kwargs: {wrong[0]} is no variable of a template that can be set here;"
            " remove it"
        )
    return dict(variables)


def _byte_vocabulary() -> dict[str, int]:
    """Maps GPT-2's character of each byte to the byte: itself if printable, else from U+0100 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in prints]
    return {chr(b): b for b in prints} | {chr(256 + i): b for i, b in enumerate(rest)}


def fingerprint(vocabulary: dict[str, int], encode: Callable[[str], list[int]]) -> str:
    """Returns a hash of all tokens, and of the ids of a text that reveals how text is split."""
    values = [sorted(vocabulary.items()), encode(_PROBE)]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Raises an InputError if the tokenizer has more ids than the model has rows.

    It may have fewer: the other rows are padding.
    """
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} ids but the model only "
            f"{vocab_size} embedding rows; use the tokenizer that the model was trained with"
        )


class TextStream:
    """Decodes ids into text piece by piece; never emits a part of a character.

    Decoding each id separately would break characters of several tokens and lose sentencepiece's
    spaces, so a window of recent ids is decoded with and without the new one.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # first id of the window
        self._shown = 0  # number of ids whose text was emitted

    def _decode(self, stop: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[self._start : stop], skip_special=True)

    def push(self, index: int) -> str:
        """Returns the text that `index` completes; empty while a character is incomplete."""
        self._ids.append(int(index))
        text = self._decode()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._decode(self._shown)) :]
        if new:  # a window of special tokens only would be the start of a text, without its space
            self._start = self._shown
        self._shown = len(self._ids)
        return new

    def finish(self) -> str:
        """Returns the rest, with U+FFFD for a character that never became complete."""
        new = self._decode()[len(self._decode(self._shown)) :]
        self._start = self._shown = len(self._ids)
        return new


def without_bos(ids: list[int], bos_id: int | None) -> list[int]:
    """Returns `ids` without BOS, and without the space that sentencepiece may put before it."""
    return ids[ids.index(bos_id) + 1 :] if bos_id in ids[:2] else ids


def encode_mid_text(tokenizer: Tokenizer, text: str, *, allow_special: bool = False) -> list[int]:
    """Returns the ids of `text` as they are inside a longer text.

    The text is encoded after another one, whose ids are then removed, because sentencepiece puts a
    space before every text. That is a letter, or a newline if the text begins with a letter or
    digit: after a letter, it would continue a word; no token joins a newline and a word.
    """
    before = "\n" if text[:1].isalnum() else "a"
    anchor = list(tokenizer.encode(before))
    ids = list(tokenizer.encode(before + text, allow_special=allow_special))
    if ids[: len(anchor)] == anchor:
        return ids[len(anchor) :]
    return list(tokenizer.encode(text, allow_special=allow_special))
