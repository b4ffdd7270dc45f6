"""The tokenizer of a Hugging Face folder: `tokenizer.json`, or `tokenizer.model`."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lcjax.checkpoints.tokenizer import JsonTokenizer, Specials, Tokenizer
from lcjax.checkpoints.tokenizer_spm import SentencePieceTokenizer
from lcjax.errors import InputError


def hf_tokenizer(folder: str | Path) -> Tokenizer:
    """Opens the tokenizer; the model's own files may name further ends of an answer."""
    folder = Path(folder)
    settings = _settings(folder)
    rows = read_json(folder / "config.json", {}).get("vocab_size")
    rows = rows if isinstance(rows, int) else None
    ids = _model_ids(folder, rows)
    template = _chat_template(folder, settings)
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder / "tokenizer.json", settings, ids, template, rows)
    if (folder / "tokenizer.model").is_file():
        return _from_sentencepiece(folder, settings, ids, template, rows)
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


def _settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`; older folders name the tokens in `special_tokens_map.json`."""
    settings = read_json(folder / "tokenizer_config.json", {})
    older = read_json(folder / "special_tokens_map.json", {})
    names = [key for key in older if key.endswith("_token") and settings.get(key) is None]
    return settings | {key: older[key] for key in names}


def _model_ids(folder: Path, rows: int | None) -> dict[str, Any]:
    """`bos`, `eos` (a tuple) and `pad` as the model's own files give them.

    Ids that no token can have are left out: Llama-1 and some Llama-2 have `pad_token_id: -1`.
    """

    def possible(index: Any) -> bool:
        return isinstance(index, int) and index >= 0 and (rows is None or index < rows)

    config = read_json(folder / "config.json", {})
    generation = read_json(folder / "generation_config.json", {})
    found = {}
    for name in ("bos", "eos", "pad"):
        key = f"{name}_token_id"
        found[name] = generation.get(key) if generation.get(key) is not None else config.get(key)
    ends = found["eos"] if isinstance(found["eos"], list) else [found["eos"]]
    found = {name: index if possible(index) else None for name, index in found.items()}
    return found | {"eos": tuple(filter(possible, ends))}


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


def _rowless(added: dict[str, int], size: int, rows: int | None, folder: Path) -> set[str]:
    """Added tokens whose ids the model has no row for, when leaving those out is enough.

    Copies of Llama-2 come with `<pad>` = 32000 beside 32,000 rows, and never use it. `size` counts
    the ids without added tokens.
    """
    beyond = {} if rows is None else {text: i for text, i in added.items() if i >= rows}
    if not beyond or size > rows:
        return set()
    named = ", ".join(f"{text} = {i}" for text, i in sorted(beyond.items())[:5])
    warnings.warn(
        f"{folder}: left out {len(beyond)} added tokens ({named}): the model has {rows} rows",
        stacklevel=5,
    )
    return set(beyond)


def _without(settings: dict[str, Any], tokens: set[str]) -> dict[str, Any]:
    """Settings that name none of `tokens`."""
    kept = {
        key: value
        for key, value in settings.items()
        if not (key.endswith("_token") and _text(value) in tokens)
    }
    if decoder := kept.get("added_tokens_decoder"):
        kept["added_tokens_decoder"] = {
            i: token for i, token in decoder.items() if _text(token) not in tokens
        }
    return kept


def _from_json(
    path: Path,
    settings: dict[str, Any],
    ids: dict[str, Any],
    template: str | None,
    rows: int | None,
) -> JsonTokenizer:
    from tokenizers import Tokenizer as Backend

    values = read_json(path)
    try:
        backend = Backend.from_str(json.dumps(values))
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{path}: not a tokenizer.json, or truncated ({error})") from error
    size = max(backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1
    tokens = values.get("added_tokens") or []
    added = {token["content"]: token["id"] for token in tokens}
    if rowless := _rowless(added, size, rows, path.parent):
        values["added_tokens"] = [token for token in tokens if token["content"] not in rowless]
        backend, settings = Backend.from_str(json.dumps(values)), _without(settings, rowless)
    fields = _specials(settings, ids, template, backend.token_to_id)
    first = backend.encode("a", add_special_tokens=True).ids[:1]
    add_bos = settings.get("add_bos_token")
    fields["add_bos"] = first == [fields["bos_id"]] if add_bos is None else bool(add_bos)
    return JsonTokenizer(backend, Specials(**fields), settings=settings or None)


def _from_sentencepiece(
    folder: Path,
    settings: dict[str, Any],
    ids: dict[str, Any],
    template: str | None,
    rows: int | None,
) -> SentencePieceTokenizer:
    path = folder / "tokenizer.model"
    model = path.read_bytes()
    added = dict(read_json(folder / "added_tokens.json", {}))
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        added[_text(token)] = int(index)
    plain = SentencePieceTokenizer(model, where=str(path))
    for token in _rowless(added, plain.vocab_size, rows, folder):
        del added[token]
    names = plain.special_ids | added
    fields = _specials(settings, ids, template, names.get)
    if fields["bos_id"] is None:
        fields["bos_id"] = plain.bos_id
    fields["eos_ids"] = fields["eos_ids"] or plain.eos_ids
    if fields["unk_id"] is None:
        fields["unk_id"] = plain.unk_id
    add_bos = settings.get("add_bos_token")
    fields["add_bos"] = True if add_bos is None else bool(add_bos)  # as Llama's tokenizer class
    return SentencePieceTokenizer(model, Specials(**fields), added=added, where=str(path))
