"""The tokenizer inside a GGUF file, built for the `tokenizers` package."""

from typing import Any

from lcjax.checkpoints.tokenizer import JsonTokenizer, Specials
from lcjax.checkpoints.tokenizer_spm import SentencePieceTokenizer, model_from_pieces
from lcjax.errors import InputError

# llama.cpp's token types
_CONTROL, _USER_DEFINED = 3, 4

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (  # cl100k: case-insensitive endings, at most {digits} digits, newlines apart
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before byte-level BPE: regular expressions, applied one after the other, each
# making its matches words of their own.
_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_WORDS,),
    "phi-2": (_WORDS,),
    "smollm": (r"\p{N}", _WORDS),
    "llama-bpe": (_MODERN.format(digits="{1,3}"),),
    "qwen2": (_MODERN.format(digits=""),),
}


def gguf_tokenizer(file: Any) -> Any:
    """The tokenizer of `file` (a `GGUFFile`)."""
    kind = file.need("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(file)
    if kind == "llama":
        return _sentencepiece(file)
    raise InputError(
        f"{file.path}: the tokenizer model {kind!r} cannot be read from GGUF; readable: gpt2, "
        "llama; load the Hugging Face folder of this model"
    )


def _sentencepiece(file: Any) -> SentencePieceTokenizer:
    model = model_from_pieces(
        file.need("tokenizer.ggml.tokens"),
        file.need("tokenizer.ggml.scores"),
        file.need("tokenizer.ggml.token_type"),
        add_prefix=file.get("tokenizer.ggml.add_space_prefix", True),
    )
    return SentencePieceTokenizer(model, _specials(file, add_bos=True), where=file.path)


def _specials(file: Any, *, add_bos: bool) -> Specials:
    def get(name: str) -> int | None:
        return file.get(f"tokenizer.ggml.{name}_token_id")

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


def _byte_level(file: Any) -> JsonTokenizer:
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
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        ignore_merges=pre == "llama-bpe",  # Llama-3: a word in the vocabulary is one token
    )
    backend = Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, tokens, file.get("tokenizer.ggml.token_type") or [])
    specials = _specials(file, add_bos=pre == "llama-bpe")
    if specials.add_bos and specials.bos_id is not None:
        bos = tokens[specials.bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, specials.bos_id)]
        )
    return JsonTokenizer(backend, specials)


def _add_special_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    """Marks control tokens as special and user-defined ones as indivisible."""
    from tokenizers import AddedToken

    found = zip(tokens, types, strict=False)
    kinds = [(token, kind) for token, kind in found if kind in (_CONTROL, _USER_DEFINED)]
    special = [AddedToken(t, special=True, normalized=False) for t, k in kinds if k == _CONTROL]
    plain = [AddedToken(t, normalized=False) for t, k in kinds if k == _USER_DEFINED]
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
