"""Opens tokenizers of Hugging Face folders (`tokenizer.json`, `tokenizer.model`) and GGUF files."""

import dataclasses
import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lcjax.checkpoints.gguf_file import GGUFFile
from lcjax.checkpoints.hf_config import text_model
from lcjax.checkpoints.hf_files import read_hf_json
from lcjax.checkpoints.tokenizer import (
    GENERATION,
    JsonTokenizer,
    SentencePieceTokenizer,
    Specials,
    Tokenizer,
)
from lcjax.errors import InputError, check_integer, is_finite_number, one_line
from lcjax.files import read_json
from lcjax.storage import to_path

# Keys of generation_config.json, and their names in GGUF metadata below `general.sampling`.
_SAMPLING = {
    **{key: key for key in ("top_k", "top_p", "min_p")},
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
}
_BPE, _BYTE = 2, 6  # sentencepiece's model type BPE and token type BYTE
# llama.cpp's token types
_CONTROL, _USER_DEFINED = 3, 4

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (  # cl100k: case-insensitive endings, at most {digits} digits, newlines apart
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# o200k: words are capitalised, lower case or upper case; `ending` may belong to a word.
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ending}|"
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ending}|"
    r"\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is split before byte-level BPE: regular expressions, applied one after the other, whose
# matches become separate words. Names and expressions are those of llama.cpp's
# `src/llama-vocab.cpp`; if it rewrites an expression of a tokenizer.json, the original is here.
_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_WORDS,),
    "phi-2": (_WORDS,),
    "olmo": (_WORDS,),
    "smollm": (r"\p{N}", _WORDS),
    "refact": (r"\p{N}", _WORDS),  # Granite 3
    "llama-bpe": (_MODERN.format(digits="{1,3}"),),
    "smaug-bpe": (_MODERN.format(digits="{1,3}"),),  # SmolLM3
    "dbrx": (_MODERN.format(digits="{1,3}"),),
    "tekken": (_CASED.format(ending="", digits=""),),  # Mistral Nemo
    "gpt-4o": (_CASED.format(ending="(?i:'s|'t|'re|'ve|'m|'ll|'d)?", digits="{1,3}"),),
    "qwen2": (_MODERN.format(digits=""),),
}
# Llama 3 and Mistral Nemo: a word in the vocabulary is one token, and texts begin with BOS.
_WHOLE_WORDS = ("llama-bpe", "tekken")


def hf_tokenizer(folder: str | Path) -> Tokenizer:
    """Opens the tokenizer of a Hugging Face folder.

    Its special tokens are those of the tokenizer's files, else those of the model's configs. The
    configs may add tokens that end an answer.
    """
    files = _Folder(to_path(folder))
    if (files.path / "tokenizer.json").is_file():
        tokenizer = _from_json(files)
    elif (files.path / "tokenizer.model").is_file():
        tokenizer = _from_sentencepiece(files)
    else:
        raise InputError(
            f"{folder}: no tokenizer.json and no tokenizer.model; copy the tokenizer of the model"
            " there"
        )
    tokenizer.generation = _generation_defaults(files.path)
    return tokenizer


def _generation_defaults(folder: Path) -> dict[str, Any]:
    """Returns what an export keeps of a model's `generation_config.json`.

    Ids of end and padding tokens are the tokenizer's. The id of BOS is kept if a config states it,
    also as null, because a tokenizer may have a BOS that the model does not use.
    """
    values = read_hf_json(folder / GENERATION, {})
    left_out = {"eos_token_id", "pad_token_id", "transformers_version", "_from_model_config"}
    kept = {key: value for key, value in values.items() if key not in left_out}
    config = read_hf_json(folder / "config.json", {})
    if kept.get("bos_token_id") is None and "bos_token_id" in config:
        kept["bos_token_id"] = config["bos_token_id"]
    return kept


class _Folder:
    """The settings in the files beside a tokenizer."""

    def __init__(self, path: Path):
        self.path = path
        settings = read_hf_json(path / "tokenizer_config.json", {})
        older = read_hf_json(path / "special_tokens_map.json", {})
        names = [key for key in older if key.endswith("_token") and settings.get(key) is None]
        self.settings: dict[str, Any] = settings | {key: older[key] for key in names}
        config = text_model(read_hf_json(path / "config.json", {}), str(path / "config.json"))
        self.rows: int | None = config.get("vocab_size")  # rows of the model's embedding
        generation = read_hf_json(path / GENERATION, {})
        stated = {key: value for key, value in generation.items() if value is not None}
        self._model_files = config | stated

    def ids(self, name: str) -> tuple[int, ...]:
        """Returns the ids of `bos`, `eos` or `pad` in the model's configs.

        Invalid ids are left out: Llama-1 and some Llama-2 have `pad_token_id: -1`.
        """
        value = self._model_files.get(f"{name}_token_id")
        return tuple(
            index
            for index in (value if isinstance(value, list) else [value])
            if index is not None and index >= 0 and (self.rows is None or index < self.rows)
        )

    def chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # named templates
            template = {t["name"]: t["template"] for t in template}.get("default")
        return template

    def specials(self, find: Callable[[str], int | None], *, add_bos: bool) -> Specials:
        """Returns the special tokens; `find` returns the id of a token's string."""

        def named(name: str) -> tuple[int, ...]:
            text = _text(self.settings.get(f"{name}_token"))
            index = None if text is None else find(text)
            return () if index is None else (index,)

        length = self.settings.get("model_max_length")
        stated = self.settings.get("add_bos_token")
        return Specials(
            bos_id=next(iter(named("bos") + self.ids("bos")), None),
            eos_ids=tuple(dict.fromkeys(named("eos") + self.ids("eos"))),
            pad_id=next(iter(named("pad") + self.ids("pad")), None),
            unk_id=next(iter(named("unk")), None),
            chat_template=self.chat_template(),
            add_bos=add_bos if stated is None else stated,
            # transformers writes 1e30 for "no limit"
            max_length=length if isinstance(length, int) and length < 10**9 else None,
        )

    def drop_tokens_without_rows(self, added: dict[str, int], size: int) -> set[str]:
        """Drops added tokens for which the model has no row from the settings, and returns them.

        None are dropped if the vocabulary without added tokens exceeds the rows, too. Copies of
        Llama-2 have `<pad>` = 32000 with 32,000 rows, and never use it.

        Args:
          added: ids of the added tokens.
          size: number of ids without added tokens.
        """
        if self.rows is None or size > self.rows:
            return set()
        beyond = {text: i for text, i in added.items() if i >= self.rows}
        if not beyond:
            return set()
        names = ", ".join(f"{text} = {i}" for text, i in sorted(beyond.items())[:5])
        warnings.warn(
            f"{self.path}: left out {len(beyond)} added tokens ({names}): the model has "
            f"{self.rows} rows",
            stacklevel=5,
        )
        self.settings = {
            key: value
            for key, value in self.settings.items()
            if not (key.endswith("_token") and _text(value) in beyond)
        }
        if decoder := self.settings.get("added_tokens_decoder"):
            self.settings["added_tokens_decoder"] = {
                i: token for i, token in decoder.items() if _text(token) not in beyond
            }
        return set(beyond)


def _text(token: Any) -> str | None:
    """Returns the string of a token, which configs hold directly or in a dictionary."""
    return token.get("content") if isinstance(token, dict) else token


def _from_json(files: _Folder) -> JsonTokenizer:
    from tokenizers import Tokenizer as Backend

    path = files.path / "tokenizer.json"
    values = read_json(path)
    try:
        backend = Backend.from_str(json.dumps(values))
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{path}: not a tokenizer.json, or truncated ({error})") from error
    size = max(backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1
    tokens = values.get("added_tokens") or []
    added = {token["content"]: token["id"] for token in tokens}
    if dropped := files.drop_tokens_without_rows(added, size):
        values["added_tokens"] = [token for token in tokens if token["content"] not in dropped]
        backend = Backend.from_str(json.dumps(values))
    specials = files.specials(backend.token_to_id, add_bos=False)
    if files.settings.get("add_bos_token") is None:
        first = backend.encode("a", add_special_tokens=True).ids[:1]
        specials = dataclasses.replace(specials, add_bos=first == [specials.bos_id])
    return JsonTokenizer(backend, specials, settings=files.settings or None)


def _from_sentencepiece(files: _Folder) -> SentencePieceTokenizer:
    path = files.path / "tokenizer.model"
    model = path.read_bytes()
    plain = SentencePieceTokenizer(model, where=str(path))
    added = dict(read_json(files.path / "added_tokens.json", {}))
    if wrong := [text for text, index in added.items() if type(index) is not int or index < 0]:
        raise InputError(
            f"{files.path / 'added_tokens.json'}: {wrong[0]!r} must have a token id; correct it"
        )
    for index, token in (files.settings.get("added_tokens_decoder") or {}).items():
        added[_text(token)] = int(index)
    for token in files.drop_tokens_without_rows(added, plain.vocab_size):
        del added[token]
    ids = plain.special_ids | added
    specials = files.specials(ids.get, add_bos=True)  # as Llama's tokenizer class
    specials = dataclasses.replace(
        specials,
        bos_id=plain.bos_id if specials.bos_id is None else specials.bos_id,
        eos_ids=specials.eos_ids or plain.eos_ids,
        unk_id=plain.unk_id if specials.unk_id is None else specials.unk_id,
    )
    return SentencePieceTokenizer(model, specials, added=added, where=str(path))


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes."""
    kind = file.need("tokenizer.ggml.model")
    read = {"gpt2": _gguf_byte_level, "llama": _gguf_sentencepiece}.get(kind)
    if read is not None:
        tokenizer = read(file)
        values = {key: file.get(f"general.sampling.{name}") for key, name in _SAMPLING.items()}
        tokenizer.generation = {k: round(v, 6) for k, v in values.items() if is_finite_number(v)}
        return tokenizer
    raise InputError(
        f"{file.path}: the tokenizer model {kind!r} cannot be read from GGUF; readable: gpt2, "
        "llama; load the Hugging Face folder of this model"
    )


def _gguf_sentencepiece(file: GGUFFile) -> SentencePieceTokenizer:
    pieces, *others = (
        file.need(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "token_type")
    )
    if any(len(other) != len(pieces) for other in others):
        raise InputError(
            f"{file.path}: tokenizer.ggml.scores and token_type must have an entry for each of the"
            f" {len(pieces)} tokens; download it again"
        )
    add_prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    model = model_from_pieces(pieces, *others, add_prefix=add_prefix)
    return SentencePieceTokenizer(model, _gguf_specials(file, add_bos=True), where=file.path)


def _gguf_specials(file: GGUFFile, *, add_bos: bool) -> Specials:
    def get(name: str) -> int | None:
        index = file.get(key := f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            most = len(file.need("tokenizer.ggml.tokens")) - 1
            check_integer(f"{file.path}: {key}", index, 0, "convert it again", most=most)
        return index

    ends = (get("eos"), get("eot"), get("eom"))
    return Specials(
        bos_id=get("bos"),
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        pad_id=get("padding"),
        unk_id=get("unknown"),
        chat_template=file.get("tokenizer.chat_template"),
        add_bos=bool(file.get("tokenizer.ggml.add_bos_token", add_bos)),
        max_length=file.get("{arch}.context_length"),
    )


def _gguf_byte_level(file: GGUFFile) -> JsonTokenizer:
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise InputError(
            f"{file.path}: the pre-tokenizer {pre!r} is not known; known: {', '.join(_SPLITS)}; "
            "load the Hugging Face folder of this model, which has a tokenizer.json"
        )
    tokens = file.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    try:
        model = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre in _WHOLE_WORDS,
        )
    except Exception as error:  # the package raises nothing narrower
        raise InputError(
            f"{file.path}: tokenizer.ggml.merges do not fit its tokens ({one_line(error)});"
            " download it again"
        ) from error
    backend = Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, tokens, file.get("tokenizer.ggml.token_type") or [])
    specials = _gguf_specials(file, add_bos=pre in _WHOLE_WORDS)
    if specials.add_bos and specials.bos_id is not None:
        bos = tokens[specials.bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, specials.bos_id)]
        )
    return JsonTokenizer(backend, specials)


def _add_special_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    """Marks control tokens as special and user-defined ones as indivisible."""
    from tokenizers import AddedToken

    def of_type(number: int, **flags: bool) -> list[AddedToken]:
        pairs = zip(tokens, types, strict=False)
        return [AddedToken(t, normalized=False, **flags) for t, kind in pairs if kind == number]

    backend.add_special_tokens(of_type(_CONTROL, special=True))
    backend.add_tokens(of_type(_USER_DEFINED))


def model_from_pieces(
    pieces: list[str], scores: list[float], types: list[int], *, add_prefix: bool
) -> bytes:
    """Returns the sentencepiece BPE model that a GGUF file's vocabulary came from.

    GGUF's token types have the numbers of sentencepiece's. The protocol buffer is written by hand:
    three messages do not need a dependency.
    """
    body = b"".join(
        _message(1, _string(1, piece) + _float(2, score) + _varint(3, kind))
        for piece, score, kind in zip(pieces, scores, types, strict=True)
    )
    byte_fallback = _BYTE in types
    body += _message(2, _varint(3, _BPE) + _varint(35, int(byte_fallback)))
    normaliser = _string(1, "identity") + _varint(3, int(add_prefix)) + _varint(4, 0)
    return body + _message(3, normaliser + _varint(5, 1))


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _float(field: int, value: float) -> bytes:
    return _number(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, body: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(body)) + body


def _string(field: int, text: str) -> bytes:
    return _message(field, text.encode())
