"""Opens tokenizers of Hugging Face folders (`tokenizer.json`, `tokenizer.model`) and GGUF files."""

import dataclasses
import json
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lcjax.checkpoints.gguf_file import GGUFFile
from lcjax.checkpoints.hf_config import text_model
from lcjax.checkpoints.hf_files import read_hf_json
from lcjax.checkpoints.tokenizer import (
    GENERATION,
    NO_PREFIX,
    ByteTokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    Specials,
    Tokenizer,
    backend_errors,
)
from lcjax.errors import InputError, check_integer, is_finite_number, one_line
from lcjax.files import read_json, read_text
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

# Other names that llama.cpp reads as one of these.
_SAME_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), "qwen2"),
    **dict.fromkeys(("starcoder", "command-r", "exaone", "minerva-7b"), "smollm"),
    **dict.fromkeys(("mpt", "exaone4", "trillion", "mellum"), "gpt-2"),
    "llama4": "gpt-4o",
}
# Control tokens at which llama.cpp ends an answer, whatever the keys say.
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<eos>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
}

Token = dict[str, Any]  # content and flags, as `tokenizers.AddedToken` takes them
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_CODE_LLAMA = "CodeLlamaTokenizer"
# Special tokens of transformers' classes where the settings name none.
_ENDOFTEXT = "<|endoftext|>"
_LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_CLASS_TOKENS: dict[str | None, dict[str, str]] = {
    "LlamaTokenizer": _LLAMA_TOKENS,
    _CODE_LLAMA: _LLAMA_TOKENS,
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _ENDOFTEXT),
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "pad_token", "unk_token"), _ENDOFTEXT),
}
# Model types for which transformers reads a tokenizer.json as it is, whatever `tokenizer_class`.
_FILES_DECIDE = (
    *("mistral", "ministral", "mixtral", "phi3", "granite", "olmo2", "olmo3"),
    *("mistral3", "ministral3", "qwen2", "glm", "glm4", "ernie4_5"),
)
# Classes that decide about prefix spaces, and the steps in tokenizer.json that they replace.
_LLAMA = ("LlamaTokenizer", _CODE_LLAMA)
_LLAMA_STEPS = {"Prepend", "Replace", "Metaspace"}


def hf_tokenizer(folder: str | Path) -> Tokenizer:
    """Opens the tokenizer of a Hugging Face folder.

    Its special tokens are those of the tokenizer's files, else those of the model's configs. The
    configs may add tokens that end an answer.
    """
    files = _Folder(to_path(folder))
    if (path := files.path / "tokenizer.json").is_file():
        with backend_errors(str(path)):
            tokenizer = _from_json(path, files)
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
    defaults = {key: value for key, value in values.items() if key not in left_out}
    config = read_hf_json(folder / "config.json", {})
    if defaults.get("bos_token_id") is None and "bos_token_id" in config:
        defaults["bos_token_id"] = config["bos_token_id"]
    return defaults


class _Folder:
    """The settings in the files beside a tokenizer."""

    def __init__(self, path: Path):
        self.path = path
        self.settings = _read_settings(path)
        config = read_hf_json(path / "config.json", {})
        # The class of transformers whose rules are in force; None: those of the files
        self.class_name = self.settings.get("tokenizer_class") or config.get("tokenizer_class")
        if not isinstance(self.class_name, str) or config.get("model_type") in _FILES_DECIDE:
            self.class_name = None
        self.class_name = self.class_name and self.class_name.removesuffix("Fast")
        config = text_model(config, str(path / "config.json"))
        self.rows: int | None = config.get("vocab_size")  # rows of the model's embedding
        generation = read_hf_json(path / GENERATION, {})
        stated = {key: value for key, value in generation.items() if value is not None}
        self._model_files = config | stated

    @property
    def is_legacy(self) -> bool:
        """Whether a prefix space precedes each part between special tokens, not only the text."""
        if self.class_name == _CODE_LLAMA:
            return False
        return bool(self.settings.get("legacy", self.class_name != "LlamaTokenizer"))

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

    def chat_template(self) -> str | dict[str, str] | None:
        """Returns the template or named templates: those in files, else in the settings."""
        others = sorted((self.path / "additional_chat_templates").glob("*.jinja"))
        files = {file.stem: file for file in others}
        if (default := self.path / "chat_template.jinja").is_file():
            files["default"] = default
        templates: Any = {name: read_text(file) for name, file in files.items()}
        if list(templates) == ["default"]:
            return templates["default"]
        templates = templates or self.settings.get("chat_template")
        if isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
        return templates

    def named(self) -> dict[str, Token]:
        """Returns the special tokens with names (`bos_token`, `image_token`), by these names."""
        names = [*_NAMES, *(key for key in self.settings if key.endswith("_token"))]
        values = {name: self.settings.get(name) for name in names}
        others = self.settings.get("extra_special_tokens")
        values |= others if isinstance(others, dict) else {}
        return {
            name: _token(value, f"{self.path}: {name}")
            for name, value in values.items()
            if isinstance(value, str | dict)
        }

    def listed(self) -> dict[int, Token]:
        """Returns tokens by the ids that `added_tokens_decoder` or `added_tokens.json` state."""
        where = f"{self.path / 'tokenizer_config.json'}: added_tokens_decoder"
        if (decoder := self.settings.get("added_tokens_decoder")) is not None:
            return {int(i): _token(token, where) for i, token in decoder.items()}
        file = self.path / "added_tokens.json"
        added = dict(read_hf_json(file, {}))
        if wrong := [text for text, index in added.items() if type(index) is not int or index < 0]:
            raise InputError(f"{file}: {wrong[0]!r} must have a token id; correct it")
        named = {name: token["content"] for name, token in self.named().items()}
        others = {token["content"] for token in self.unnamed()}
        special = others | {*named.values()}
        verbatim = others | {text for name, text in named.items() if name in _NAMES}
        return {
            i: _token(text, where)
            | {"special": text in special, "normalized": text not in verbatim}
            for text, i in added.items()
        }

    def unnamed(self) -> list[Token]:
        """Returns the special tokens without names."""
        tokens = self.settings.get("extra_special_tokens")
        if not isinstance(tokens, list):
            tokens = self.settings.get("additional_special_tokens")
        where = f"{self.path}: extra_special_tokens"
        return [_token(token, where) for token in tokens] if isinstance(tokens, list) else []

    def added(self, tokens: dict[int, Token], controls: Sequence[Token] = ()) -> list[Token]:
        """Returns the tokens that transformers adds to `tokens` of the tokenizer, in its order.

        Listed tokens come first; they also change the flags of tokens with the same string. Of
        other definitions of a token, the last one that differs decides about its flags.

        Args:
          tokens: the added tokens of the tokenizer's own file, by id.
          controls: control tokens of the model, which are defined after all others.
        """
        named, listed = self.named(), self.listed()
        if self.settings.get("added_tokens_decoder") is None:
            listed = tokens | listed
        added = {token["content"]: token for _, token in sorted(listed.items())}
        present = {token["content"]: token["special"] for token in tokens.values()}
        known, defined = present.keys() | added.keys(), []
        for token in (*named.values(), *self.unnamed(), *controls):
            if token["content"] not in known and token not in defined:
                defined.append(token)
                added[token["content"]] = token
        special = {token["content"] for token in named.values()}
        if self.class_name not in _LLAMA:  # which begins with the listed tokens
            special |= {text for text, flag in present.items() if flag}
        return [t | {"special": t["special"] or text in special} for text, t in added.items()]

    def specials(self, find: Callable[[str], int | None], *, add_bos: bool) -> Specials:
        """Returns the special tokens; `find` returns the id of a token's string."""
        names = {key: token["content"] for key, token in self.named().items()}
        names = {key: text for key, text in names.items() if find(text) is not None}

        def first(name: str) -> tuple[int, ...]:
            text = names.get(f"{name}_token")
            return () if text is None else (find(text),)

        length = self.settings.get("model_max_length")
        return Specials(
            bos_id=next(iter(first("bos") + self.ids("bos")), None),
            eos_ids=tuple(dict.fromkeys(first("eos") + self.ids("eos"))),
            pad_id=next(iter(first("pad") + self.ids("pad")), None),
            unk_id=next(iter(first("unk")), None),
            chat_template=self.chat_template(),
            add_bos=add_bos,
            # transformers writes 1e30 for "no limit"
            max_length=length if isinstance(length, int) and length < 10**9 else None,
            names=names,
        )

    def without_rows(self, added: dict[str, int], size: int) -> set[str]:
        """Returns the added tokens for which the model has no row; a warning names them.

        There are none if the vocabulary without added tokens exceeds the rows, too. Copies of
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
        return set(beyond)

    def settings_without(self, left_out: set[str]) -> dict[str, Any]:
        """Returns the settings for `save`, without these tokens."""

        def keeps(value: Any) -> bool:
            text = value.get("content") if isinstance(value, dict) else value
            return not isinstance(text, str) or text not in left_out

        settings = {
            key: value
            for key, value in self.settings.items()
            if not key.endswith("_token") or keeps(value)
        }
        for key in ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"):
            if isinstance(value := settings.get(key), dict):
                settings[key] = {k: token for k, token in value.items() if keeps(token)}
            elif isinstance(value, list):
                settings[key] = [token for token in value if keeps(token)]
        return settings


def _read_settings(path: Path) -> dict[str, Any]:
    """Returns `tokenizer_config.json`, with the tokens of the file that older versions wrote.

    As in transformers, `special_tokens_map.json` is read only without `added_tokens_decoder`, and
    its values come first.
    """
    settings = read_hf_json(path / "tokenizer_config.json", {})
    if settings.get("added_tokens_decoder") is None:
        settings.pop("added_tokens_decoder", None)
        if not settings.get("extra_special_tokens") and "additional_special_tokens" in settings:
            settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
        for key, value in read_hf_json(path / "special_tokens_map.json", {}).items():
            if key == "extra_special_tokens" and isinstance(value, list):
                value = [*(settings.get(key) or []), *value]
            elif isinstance(value, dict) and "content" in value:
                value = value | {"__type": "AddedToken", "special": True}
            settings[key] = value
    if not isinstance(settings.get("extra_special_tokens"), dict):  # which names tokens
        others = settings.pop("additional_special_tokens", None)
        if not settings.get("extra_special_tokens") and others:
            settings["extra_special_tokens"] = others
    return settings


def _token(value: Any, where: str) -> Token:
    """Returns a token, which configs hold as a string or as a dictionary with flags."""
    token = {"content": value} if isinstance(value, str) else value
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        raise InputError(
            f"{where}={value!r:.60} must be a token: a string, or a dictionary with its content"
        )
    flags = {flag: bool(token.get(flag)) for flag in ("lstrip", "rstrip", "single_word")}
    special = bool(token.get("special", isinstance(value, str)))
    normalized = bool(token.get("normalized", not special))
    return {"content": token["content"], "special": special, "normalized": normalized} | flags


def _from_json(path: Path, files: _Folder) -> JsonTokenizer:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    values = read_json(path)
    backend = Backend.from_str(json.dumps(values))
    if files.class_name in _LLAMA:
        _use_llama_rules(backend, values, files)
    for key, text in _CLASS_TOKENS.get(files.class_name, {}).items():
        if backend.token_to_id(text) is not None:
            files.settings.setdefault(key, text)
    size = max(backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1
    where = f"{path}: added_tokens"
    tokens = {t["id"]: _token(t, where) for t in values.get("added_tokens") or []}
    backend.add_tokens([AddedToken(**token) for token in files.added(tokens)])
    added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    if left_out := files.without_rows(added, size):
        values = json.loads(backend.to_str())
        values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] not in left_out]
        backend = Backend.from_str(json.dumps(values))
    specials = files.specials(backend.token_to_id, add_bos=False)
    # The post-processor decides; transformers ignores `add_bos_token` beside a tokenizer.json.
    first = backend.encode("a", add_special_tokens=True).ids[:1]
    add_bos = first == [specials.bos_id] or files.class_name == _CODE_LLAMA
    if backend.get_vocab_size() == ByteTokenizer.vocab_size and not add_bos:
        # Older versions of lcjax saved the byte tokenizer without a post-processor.
        is_bytes = backend.get_vocab() == ByteTokenizer.vocabulary()
        add_bos = is_bytes and bool(files.settings.get("add_bos_token"))
    specials = dataclasses.replace(specials, add_bos=add_bos and specials.bos_id is not None)
    settings = files.settings_without(left_out)
    return JsonTokenizer(backend, specials, settings=settings, where=str(path))


def _use_llama_rules(backend: Any, values: dict[str, Any], files: _Folder) -> None:
    """Sets what transformers' LlamaTokenizer decides about a Llama-like `backend`.

    With `legacy`, a space precedes each part between special tokens, else only the whole text.
    Byte-level tokenizers have no such spaces; transformers ignores the class for them.
    """
    from tokenizers import decoders, pre_tokenizers

    parts = [values.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    if '"ByteLevel"' in json.dumps(parts):
        files.class_name = None
        return
    steps = {step for part in parts[:2] for step in _steps(part)}
    if values["model"].get("type") != "BPE" or not steps <= _LLAMA_STEPS:
        return
    prefix = files.settings.get("add_prefix_space") is not False
    scheme = "never" if not prefix else "always" if files.is_legacy else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix or files.class_name == _CODE_LLAMA:
        decode.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(decode)


def _steps(part: dict[str, Any] | None) -> list[str]:
    """Returns the types of a part of a tokenizer.json, or of the parts of a sequence."""
    if part is None:
        return []
    parts = part.get("normalizers") or part.get("pretokenizers") or [part]
    return [step.get("type") for step in parts]


def _from_sentencepiece(files: _Folder) -> SentencePieceTokenizer:
    path = files.path / "tokenizer.model"
    model = path.read_bytes()
    if files.settings.get("add_prefix_space") is False:
        if files.class_name in _LLAMA:
            model += NO_PREFIX
        else:  # of no effect: `save` may write where another class is in force
            del files.settings["add_prefix_space"]
    plain = SentencePieceTokenizer(model, where=str(path))
    ends = plain.eos_ids[0] if plain.eos_ids else None
    for name, i in (("bos", plain.bos_id), ("eos", ends), ("unk", plain.unk_id)):
        if i is not None:
            files.settings.setdefault(f"{name}_token", plain.token(i))
    added = dict(files.listed())
    ids = plain.special_ids | {token["content"]: i for i, token in added.items()}
    size = max([plain.vocab_size, *(i + 1 for i in added)])
    controls = [text for text, i in plain.special_ids.items() if i != plain.unk_id]
    if isinstance(files.settings.get("extra_special_tokens"), list):  # they take their place
        controls = []
    for token in files.added(added, [_token(text, str(path)) for text in controls]):
        if (index := ids.get(token["content"])) is None:
            index = plain.find(token["content"])
        if index is None:
            index, size = size, size + 1
        added[index] = token
    added_ids = {token["content"]: i for i, token in added.items()}
    left_out = files.without_rows(added_ids, plain.vocab_size)
    added = {i: token for i, token in added.items() if token["content"] not in left_out}
    ids = plain.special_ids | {token["content"]: i for i, token in added.items()}
    # Llama's class puts BOS before a text by default, as Meta's reference.
    stated = files.settings.get("add_bos_token")
    specials = files.specials(ids.get, add_bos=True if stated is None else bool(stated))
    return SentencePieceTokenizer(
        model,
        specials,
        added=added,
        settings=files.settings_without(left_out),
        legacy=files.is_legacy,
        where=str(path),
    )


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

    tokens = file.need("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type") or []
    names = {
        t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL
    }
    by_name = _ENDS & names.keys()
    if {"<|return|>", "<|call|>"} <= by_name:  # <|end|> ends a part of the answer then
        by_name.discard("<|end|>")
    ends = (get("eos"), get("eot"), get("eom"), *sorted(names[text] for text in by_name))
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
    )

    pre = file.get("tokenizer.ggml.pre", "default")
    pre = _SAME_SPLITS.get(pre, pre)
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
    return JsonTokenizer(backend, specials, where=str(file.path))


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
