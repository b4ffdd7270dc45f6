"""The tokenizer of a Hugging Face folder: `tokenizer.json`, or `tokenizer.model`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lcjax.convert.tokenizer import JsonTokenizer, Specials, Tokenizer
from lcjax.convert.tokenizer_spm import SentencePieceTokenizer
from lcjax.errors import InputError


def hf_tokenizer(folder: str | Path) -> Tokenizer:
    """Opens the tokenizer; the model's own files may name further ends of an answer."""
    folder = Path(folder)
    settings = read_json(folder / "tokenizer_config.json", {})
    ids = _model_ids(folder)
    template = _chat_template(folder, settings)
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder / "tokenizer.json", settings, ids, template)
    if (folder / "tokenizer.model").is_file():
        return _from_sentencepiece(folder, settings, ids, template)
    raise InputError(
        f"{folder}: no tokenizer.json and no tokenizer.model; copy the tokenizer of the model there"
    )


def read_json(path: Path, default: Any = None) -> Any:
    """The file's dictionary; `default` when it is absent."""
    if not path.is_file() and default is not None:
        return default
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; is this a Hugging Face model folder?") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON, or truncated ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold a JSON object, not a {type(values).__name__}")
    return values


def _model_ids(folder: Path) -> dict[str, Any]:
    """`bos`, `eos` (a tuple) and `pad` as the model's own files give them."""
    config = read_json(folder / "config.json", {})
    generation = read_json(folder / "generation_config.json", {})
    found = {}
    for name in ("bos", "eos", "pad"):
        key = f"{name}_token_id"
        found[name] = generation.get(key) if generation.get(key) is not None else config.get(key)
    eos = found["eos"]
    found["eos"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    return found


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template


def _text(token: Any) -> str | None:
    """A token's string: configs hold it bare or inside a dictionary."""
    return token.get("content") if isinstance(token, dict) else token


def _specials(
    settings: dict[str, Any],
    ids: dict[str, Any],
    template: str | None,
    find: Callable[[str], int | None],
) -> dict[str, Any]:
    """Fields of `Specials`: the tokenizer's own tokens, else the model's ids.

    The model's files may add ends of an answer to the end of a document.
    """

    def named(name: str) -> int | None:
        text = _text(settings.get(f"{name}_token"))
        return None if text is None else find(text)

    bos, eos, pad = named("bos"), named("eos"), named("pad")
    ends = tuple(dict.fromkeys((() if eos is None else (eos,)) + ids["eos"]))
    length = settings.get("model_max_length")
    return {
        "bos_id": ids["bos"] if bos is None else bos,
        "eos_ids": ends,
        "pad_id": ids["pad"] if pad is None else pad,
        "unk_id": named("unk"),
        "chat_template": template,
        # transformers writes 1e30 for "no limit"
        "max_length": length if isinstance(length, int) and length < 10**9 else None,
    }


def _from_json(
    path: Path, settings: dict[str, Any], ids: dict[str, Any], template: str | None
) -> JsonTokenizer:
    from tokenizers import Tokenizer as Backend

    text = path.read_text(encoding="utf-8")
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{path}: not a tokenizer.json, or truncated ({error})") from error
    fields = _specials(settings, ids, template, backend.token_to_id)
    first = backend.encode("a", add_special_tokens=True).ids[:1]
    add_bos = settings.get("add_bos_token")
    fields["add_bos"] = first == [fields["bos_id"]] if add_bos is None else bool(add_bos)
    return JsonTokenizer(backend, Specials(**fields), settings=settings or None)


def _from_sentencepiece(
    folder: Path, settings: dict[str, Any], ids: dict[str, Any], template: str | None
) -> SentencePieceTokenizer:
    path = folder / "tokenizer.model"
    model = path.read_bytes()
    added = dict(read_json(folder / "added_tokens.json", {}))
    for index, token in settings.get("added_tokens_decoder", {}).items():
        added[_text(token)] = int(index)
    plain = SentencePieceTokenizer(model, added=added, where=str(path))
    names = plain.special_ids
    fields = _specials(settings, ids, template, names.get)
    if fields["bos_id"] is None:
        fields["bos_id"] = plain.bos_id
    fields["eos_ids"] = fields["eos_ids"] or plain.eos_ids
    if fields["unk_id"] is None:
        fields["unk_id"] = plain.unk_id
    fields["add_bos"] = settings.get("add_bos_token", True)  # as Llama's tokenizer class
    return SentencePieceTokenizer(model, Specials(**fields), added=added, where=str(path))
