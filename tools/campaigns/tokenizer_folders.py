"""Tokenizer folders drawn at random, opened by `hf_tokenizer` and by transformers' AutoTokenizer.

    python -m tools.campaigns.tokenizer_folders --seed 0 --count 300
    python -m tools.campaigns.tokenizer_folders --seed 0 --only 17  # shows what differs in one

A folder has one of five kinds of vocabulary, random settings of its normaliser, pre-tokenizer and
special tokens, and these in random places: the keys and files from which transformers reads them.
Random texts, with special tokens inside and spaces at their ends, must have equal ids with and
without reading special tokens, equal texts when decoded, an equal BOS, and conversations must be
rendered equally, with tools and without. All of it holds for the folder that `save` writes, too,
beside the config.json of the first one, as in an exported model.
A folder that transformers cannot open may be opened or refused. Training orders equal candidates of
unigram and WordPiece vocabularies differently in each process, so that a repeated folder has equal
settings, but may have a few other words.

lcjax does not follow transformers 5 in seven points. What differs because of one of them, and only
that, is counted under its name:

- "class": of classes such as GPT2Tokenizer, transformers replaces the normalizer and the
  pre-tokenizer of tokenizer.json. Models were trained with those of the file: SmolLM2 splits
  digits, and the class does not. The reference is the class that reads the file as it is. Beside
  a config.json of Qwen2, transformers uses Qwen2Tokenizer whatever the folder says.
- "sentencepiece": LlamaTokenizer ignores the normaliser of a tokenizer.model, its model type and
  its user-defined pieces, and puts no prefix space before a space. The reference is sentencepiece.
- "unigram": with `split_special_tokens`, transformers still finds special tokens of a vocabulary,
  although "<s>" is to be text then, as it is for all other vocabularies.
- "control tokens": with `extra_special_tokens`, transformers reads control tokens of a
  tokenizer.model as text, which it reads as tokens without that key.
- "additional_special_tokens": if special_tokens_map.json names a token of added_tokens.json so,
  `all_special_tokens` of transformers has it, but decoding does not leave it out.
- "redefined token": if tokenizer_config.json changes the flag `normalized` of a token, transformers
  decodes it as normalized text ("▁<|im_end|>") until it has saved and opened its own folder.
- "BOS": without `add_bos_token`, transformers 5.24 puts no BOS before the text of a
  tokenizer.model. LlamaTokenizer's documentation says that it does; version 4 and Meta's code do.
"""

import argparse
import collections
import functools
import io
import json
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lcjax.checkpoints.tokenizer_files import hf_tokenizer
from lcjax.errors import InputError

CORPUS = [
    "The ferry leaves the pier at seven in the morning and returns at nine in the evening.",
    "Seven boats were counted on Monday, 12 on Tuesday, 345 on Friday; don't HE'LL we've.",
    "Naïve café, 日本語のテキスト, Привет мир.\n\n  def f(x):\n\treturn x**2",
] * 4
WORDS = [
    *("ferry", "The", "pier's", "don't", "HE'LL", "12345", "日本語", "naïve", "ai\u0308", "ﬁ", "½"),
    *("🙂", "\u200d", "\u00a0", "▁", "▁▁x", "\n", "\r\n", "\t", "  ", "   ", " ", ".", " .", " ,"),
    *("n't", "x**2", "\x00", "ẞ", "İ", "(", "#", "a", "<", "[INST]"),
]
NAMED = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
SPECIALS = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
NEW = ("<|tool|>", "<|image|>", "[CLS]", "new word", "ferryman", "<fim>")  # in no vocabulary
KINDS = ("bytes", "llama", "unigram", "wordpiece", "sentencepiece", "both")
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
TOOLS = "{{ bos_token }}TOOLS {% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + PLAIN
FUNCTION = {"name": "depth", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
MESSAGES = [{"role": "user", "content": "How deep?"}, {"role": "assistant", "content": "Six."}]


@functools.cache
def trained(kind: str) -> dict[str, Any]:
    """Returns the `tokenizer.json` of a small vocabulary, as a dictionary."""
    special = list(SPECIALS)
    if kind == "bytes":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "llama":
        backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    elif kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=special, show_progress=False
        )
    backend.train_from_iterator(CORPUS, trainer)
    values = json.loads(backend.to_str())
    if kind == "llama":  # bytes are ordinary tokens
        values["added_tokens"] = values["added_tokens"][: len(SPECIALS)]
    return values


@functools.cache
def trained_model(settings: tuple[tuple[str, Any], ...]) -> bytes:
    """Returns a sentencepiece model."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        hard_vocab_limit=False,
        minloglevel=3,
        **dict(settings),
    )
    return out.getvalue()


class Draw:
    """Draws the files of one folder."""

    def __init__(self, seed: int, index: int, kind: str | None = None):
        self.rng = random.Random(f"{seed} {index}")
        self.kind = kind or KINDS[index % len(KINDS)]
        self.files: dict[str, str | bytes] = {}
        self.settings: dict[str, Any] = {}
        self.vocabulary: list[str] = []
        self.is_llama = True  # whether transformers reads a sentencepiece model as its package
        self.controls: list[str] = []  # control tokens of that model

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def write(self, folder: Path) -> None:
        """Draws all files and writes them into `folder`."""
        if self.kind in ("sentencepiece", "both"):
            self.sentencepiece()
        if self.kind != "sentencepiece":
            self.json({"both": "llama"}.get(self.kind, self.kind))
        self.classes()
        self.special_tokens()
        self.templates()
        if self.chance(0.05):
            self.settings = {}
        else:
            self.files["tokenizer_config.json"] = json.dumps(self.settings)
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def sentencepiece(self) -> None:
        pick = self.rng.choice
        settings: dict[str, Any] = {
            "model_type": pick(("bpe", "unigram")),
            "add_dummy_prefix": pick((True, True, False)),
            "remove_extra_whitespaces": pick((False, True)),
            "normalization_rule_name": pick(("identity", "identity", "nmt_nfkc", "nfkc_cf")),
            "byte_fallback": pick((True, True, False)),
        }
        self.is_llama = self.chance(0.6)
        if self.is_llama:
            settings |= {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": True}
            settings |= {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
        elif self.chance(0.3):
            settings["user_defined_symbols"] = "<|im_end|>,ferry"
        settings["vocab_size"] = 400 if settings["byte_fallback"] else 150
        if self.chance(0.3):
            settings["control_symbols"] = "<|im_start|>"
        if self.chance(0.2):
            settings["split_digits"] = True
        self.files["tokenizer.model"] = model = trained_model(tuple(settings.items()))
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocabulary = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
        self.controls = [t for i, t in enumerate(self.vocabulary) if processor.is_control(i)]

    def json(self, kind: str) -> None:
        values = json.loads(json.dumps(trained(kind)))
        vocab = values["model"]["vocab"]
        self.vocabulary = [*vocab] if isinstance(vocab, dict) else [piece for piece, _ in vocab]
        getattr(self, f"json_{kind}")(values)
        for token in values["added_tokens"]:
            for flag in ("lstrip", "rstrip", "single_word", "normalized"):
                token[flag] = token[flag] or self.chance(0.07)
            token["special"] = self.chance(0.9)
        values["post_processor"] = self.post_processor()
        self.files["tokenizer.json"] = json.dumps(values)

    def json_bytes(self, values: dict[str, Any]) -> None:
        from lcjax.checkpoints.tokenizer_files import _SPLITS

        values["normalizer"] = self.rng.choice((None, None, {"type": "NFC"}))
        level = values["pre_tokenizer"]
        level["add_prefix_space"] = self.chance(0.2)
        if self.chance(0.5):
            splits = [
                {"type": "Split", "pattern": {"Regex": e}, "behavior": "Isolated", "invert": False}
                for e in _SPLITS[self.rng.choice(("llama-bpe", "gpt-4o", "qwen2", "smollm"))]
            ]
            level["use_regex"] = False
            values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, level]}
        values["model"]["ignore_merges"] = self.chance(0.2)

    def json_llama(self, values: dict[str, Any]) -> None:
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        prefixed = self.chance(0.7)
        if self.chance(0.5):  # as transformers 4 converts Llama-2
            prepend = [{"type": "Prepend", "prepend": "▁"}] if prefixed else []
            values["normalizer"] = {"type": "Sequence", "normalizers": [*prepend, replace]}
            values["pre_tokenizer"] = None
        else:
            scheme = self.rng.choice(("first", "always")) if prefixed else "never"
            space = {"replacement": "▁", "prepend_scheme": scheme, "split": self.chance(0.2)}
            values["pre_tokenizer"] = {"type": "Metaspace"} | space
        steps = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]
        values["decoder"] = {"type": "Sequence", "decoders": steps[: 4 if prefixed else 3]}

    def json_unigram(self, values: dict[str, Any]) -> None:
        values["normalizer"] = self.rng.choice((None, {"type": "NFKC"}, {"type": "Nmt"}))
        for key in ("pre_tokenizer", "decoder"):
            values[key]["prepend_scheme"] = self.rng.choice(("first", "always", "never"))
            values[key]["split"] = self.chance(0.8)

    def json_wordpiece(self, values: dict[str, Any]) -> None:
        values["normalizer"]["lowercase"] = self.chance(0.5)
        values["normalizer"]["strip_accents"] = self.rng.choice((None, True, False))
        values["decoder"]["cleanup"] = self.chance(0.5)

    def post_processor(self) -> dict[str, Any] | None:
        if self.chance(0.4):
            return None

        def special(name: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": name, "type_id": 0}}

        single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        single = [special("<s>")] * self.chance(0.7) + single + [special("</s>")] * self.chance(0.3)
        tokens = {
            name: {"id": name, "ids": [self.vocabulary.index(name)], "tokens": [name]}
            for name in ("<s>", "</s>")
        }
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": tokens,
        }

    def classes(self) -> None:
        """Draws the class of the tokenizer, its settings, and the model type beside it."""
        pick = self.rng.choice
        names = {
            "bytes": ("GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizerFast"),
            "llama": ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer"),
            "sentencepiece": ("LlamaTokenizer", "LlamaTokenizer", "LlamaTokenizerFast"),
            "both": ("LlamaTokenizer", "LlamaTokenizerFast"),
        }.get(self.kind, ("PreTrainedTokenizerFast",))
        if self.chance(0.9):
            self.settings["tokenizer_class"] = pick(("PreTrainedTokenizerFast", *names))
        if self.settings.get("tokenizer_class") == "CodeLlamaTokenizer":  # it would add five tokens
            infilling = ("prefix", "middle", "suffix", "eot", "fill")
            self.settings |= dict.fromkeys(f"{name}_token" for name in infilling)
        for key, share in {
            "legacy": 0.4,
            "add_bos_token": 0.4,
            "add_eos_token": 0.2,
            "add_prefix_space": 0.3,
            "clean_up_tokenization_spaces": 0.5,
            "spaces_between_special_tokens": 0.3,
            "add_dummy_prefix": 0.1,
        }.items():
            if self.chance(share):
                self.settings[key] = pick((True, False, *[None] * (key == "legacy")))
        if self.chance(0.05):
            self.settings["split_special_tokens"] = True
        if self.chance(0.2):
            self.settings["model_max_length"] = pick((64, 10**30))
        if self.chance(0.4):
            kinds = ("llama", "mistral", "qwen2", "phi3", "gemma2", "smollm3")
            self.files["config.json"] = json.dumps({"model_type": pick(kinds)})

    def added(self, text: str, **fixed: Any) -> dict[str, Any]:
        flags = {name: self.chance(0.15) for name in ("lstrip", "rstrip", "single_word")}
        flags |= {"normalized": self.chance(0.3), "special": self.chance(0.8)}
        return {"content": text} | flags | fixed

    def special_tokens(self) -> None:
        """Draws special tokens and puts each into one of the places that transformers reads."""
        pick, settings = self.rng.choice, self.settings
        existing = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}
        older: dict[str, Any] = {}
        is_model = self.kind == "sentencepiece"
        for name in NAMED:
            text = existing.get(name)
            if text not in self.vocabulary or (not is_model and self.chance(0.15)):
                text = pick([text for text in NEW if " " not in text])  # BOS with a space: an error
            if not self.chance(0.7 if name in existing else 0.1):
                continue
            place = settings if self.chance(0.8) else older
            token: Any = text
            if self.chance(0.2):
                token = self.added(text, special=True)
                if place is settings:
                    token["__type"] = "AddedToken"
            place[f"{name}_token"] = token
        for key in ("additional_special_tokens", "extra_special_tokens", "image_token"):
            if not self.chance(0.15):
                continue
            if key == "image_token":
                settings[key] = pick(NEW)
                continue
            tokens: Any = self.rng.sample((*NEW, "<|im_end|>"), 2)
            if key == "extra_special_tokens" and not is_model and self.chance(0.3):
                tokens = {"audio_token": tokens[0]}
            elif key == "additional_special_tokens" and not is_model and self.chance(0.3):
                older[key] = tokens
                continue
            settings[key] = tokens
        new = [text for text in NEW if self.chance(0.15)]
        size = len(self.vocabulary)
        if self.chance(0.3):
            tokens = [token for token in SPECIALS if token in self.vocabulary]
            if self.kind == "bytes":  # classes that rebuild the tokenizer lose those not listed
                tokens = tokens[: self.rng.randrange(len(tokens))]
            decoder = {str(self.vocabulary.index(t)): self.added(t) for t in tokens}
            decoder |= {str(size + i): self.added(text) for i, text in enumerate(new)}
            settings["added_tokens_decoder"] = decoder
        elif self.chance(0.3):
            self.files["added_tokens.json"] = json.dumps(
                {text: size + i for i, text in enumerate(new)}
            )
        if older:
            self.files["special_tokens_map.json"] = json.dumps(older)

    def templates(self) -> None:
        names = {"default": PLAIN, "tool_use": TOOLS, "rag": "RAG " + PLAIN}
        kept = {name: text for name, text in names.items() if self.chance(0.7)}
        draw = self.rng.random()
        if draw < 0.3:
            self.settings["chat_template"] = self.rng.choice((PLAIN, TOOLS))
        elif draw < 0.6:
            self.settings["chat_template"] = [
                {"name": name, "template": text} for name, text in kept.items()
            ]
        if self.chance(0.4):
            for name, text in kept.items():
                file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
                self.files[f"{file}.jinja"] = text

    def text(self) -> str:
        """Draws a text with words, special tokens and spaces at its ends."""
        tokens = (*SPECIALS, *NEW, *self.vocabulary[-3:])
        parts = [
            self.rng.choice(tokens if self.chance(0.25) else WORDS)
            for _ in range(self.rng.choice((0, 1, 2, 4, 8, 16)))
        ]
        return "".join(f"{part} " if self.chance(0.4) else part for part in parts)


EXPECTED = ("equal", "neither opens it", "transformers cannot open it")
DOCUMENTED = "equal but for "
Key = str | tuple[str, str]  # a question, or one about a text
Values = dict[Key, Any]  # what a tokenizer gives, by question
_FOLLOWED = ("TokenizersBackend", "LlamaTokenizer", "CodeLlamaTokenizer")


def answers(theirs: Any, texts: list[str]) -> Values:
    """Returns what a tokenizer of transformers gives for the texts."""
    values: Values = {"add_bos": theirs("a")["input_ids"][:1] == [theirs.bos_token_id]}
    for name in ("bos", "eos", "pad", "unk"):
        values[f"{name}_id"] = getattr(theirs, f"{name}_token_id")
    for text in texts:
        as_text = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        as_special = theirs(text, add_special_tokens=False)["input_ids"]
        for name, tokens in (("special", as_special), ("text", as_text)):
            values[f"{name} ids", text] = tokens
            values[f"decoded {name}", text] = theirs.decode(tokens)
            skipped = theirs.decode(tokens, skip_special_tokens=True)
            values[f"decoded {name}, skipped", text] = skipped
    for name, tools in (("chat", None), ("chat with tools", [TOOL])):
        try:
            values[name] = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        except ValueError:
            values[name] = None
    return values


def of_transformers(folder: Path, texts: list[str]) -> tuple[Any, Values, set[str]]:
    """Returns the reference, its answers, and "class" if AutoTokenizer answers otherwise.

    Raises whatever AutoTokenizer raises.
    """
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    values = answers(theirs, texts)
    if type(theirs).__name__ in _FOLLOWED:
        return theirs, values, set()
    theirs = transformers.TokenizersBackend.from_pretrained(folder)
    as_file = answers(theirs, texts)
    return theirs, as_file, {"class"} if values != as_file else set()


def documented(draw: Draw, folder: Path, theirs: Any, key: Key) -> str | None:
    """Returns the point that explains a difference in this question, if any."""
    question, text = key if isinstance(key, tuple) else (key, None)
    is_model = draw.kind == "sentencepiece"
    if text is None:
        stated = "add_bos_token" in theirs.init_kwargs
        return "BOS" if question == "add_bos" and is_model and not stated else None
    splits = "text" in question or theirs.split_special_tokens
    if draw.kind == "unigram" and splits and any(token in text for token in SPECIALS):
        return "unigram"
    if is_model and not (draw.is_llama and follows_sentencepiece(text)):
        return "sentencepiece"
    added = theirs.added_tokens_decoder
    if any(token in text and token not in theirs.added_tokens_encoder for token in draw.controls):
        return "control tokens"
    file = folder / "added_tokens.json"
    listed = json.loads(file.read_text()) if file.is_file() else {}
    special = set(theirs.all_special_tokens) & listed.keys()
    if any(token.content in special and not token.special for token in added.values()):
        return "additional_special_tokens"
    strings = theirs.convert_ids_to_tokens([*added])
    if "decoded" in question and strings != [token.content for token in added.values()]:
        return "redefined token"
    return None


def follows_sentencepiece(text: str) -> bool:
    """Returns whether no part of the text, between special tokens, begins with a space."""
    parts = re.split("|".join(map(re.escape, (*SPECIALS, *NEW))), text)
    return not any(part.startswith((" ", "▁")) for part in parts)


def of_lcjax(folder: Path, reference: Values) -> tuple[Any, Values]:
    """Returns the tokenizer and what it answers; it decodes the ids of the reference."""
    ours = hf_tokenizer(folder)
    values: Values = {name: getattr(ours, name) for name in ("bos_id", "pad_id", "unk_id")}
    values["eos_id"] = ours.eos_ids[0] if ours.eos_ids else None
    values["add_bos"] = ours.add_bos
    for key, ids in reference.items():
        if not isinstance(key, tuple) or not key[0].endswith(" ids"):
            continue
        name, text = key[0].removesuffix(" ids"), key[1]
        values[key] = list(ours.encode(text, allow_special=name == "special"))
        values[f"decoded {name}", text] = ours.decode(ids)
        values[f"decoded {name}, skipped", text] = ours.decode(ids, skip_special=True)
    for name, tools in (("chat", {}), ("chat with tools", {"tools": [TOOL]})):
        try:
            values[name] = ours.render_chat(MESSAGES, False, **tools)
        except InputError:
            values[name] = None
    return ours, values


def of_sentencepiece(draw: Draw, ours: Any, texts: list[str]) -> Iterator[tuple[str, str]]:
    """Yields where ordinary text has other ids or another decoded text than in sentencepiece."""
    added = [token["content"] for token in ours._tokens.values() if not token["special"]]
    processor = sentencepiece.SentencePieceProcessor(model_proto=ours._model)
    for text in texts:
        if any(token in text for token in added):
            continue
        expected = processor.encode(text)
        for question, right, answer in (
            ("sentencepiece ids", expected, ours.encode(text)),
            ("sentencepiece decode", processor.decode(expected), ours.decode(expected)),
        ):
            if right != answer and processor.unk_id() not in expected:
                yield question, f"{question} of {text!r}: {right!r}, lcjax {answer!r}"


def differences(reference: Values, values: Values) -> Iterator[tuple[Key, str]]:
    """Yields the question, and both answers in one line."""
    for key, expected in reference.items():
        if values[key] != expected:
            question, text = key if isinstance(key, tuple) else (key, None)
            where = "" if text is None else f" of {text!r}"
            yield key, f"{question}{where}: expected {expected!r}, lcjax {values[key]!r}"


def run(seed: int, index: int, root: Path, kind: str | None = None) -> tuple[str, list[str]]:
    """Draws and compares one folder; returns the outcome and the lines that explain it."""
    draw = Draw(seed, index, kind)
    folder, saved = root / "folder", root / "saved"
    for path in (folder, saved):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir()
    draw.write(folder)
    texts = ["", " ", " a b ", *(draw.text() for _ in range(12))]
    try:
        theirs, reference, points = of_transformers(folder, texts)
    except BaseException as error:  # Rust's panics are no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        try:
            hf_tokenizer(folder)
        except InputError:
            return EXPECTED[1], []
        return EXPECTED[2], [f"{type(error).__name__}: {error}"[:200]]
    try:
        ours, values = of_lcjax(folder, reference)
    except InputError as error:
        return "refused", [str(error)]
    lines: list[tuple[str, str]] = []

    def compare(where: str, folder: Path, theirs: Any, reference: Values, values: Values) -> None:
        for key, line in differences(reference, values):
            if point := documented(draw, folder, theirs, key):
                points.add(point)
            else:
                lines.append((where + (key if isinstance(key, str) else key[0]), line))

    compare("", folder, theirs, reference, values)
    if draw.kind == "sentencepiece":
        lines += of_sentencepiece(draw, ours, texts)
    ours.save(saved)
    _, again = of_lcjax(saved, reference)
    lines += [(f"saved: {key}", line) for key, line in differences(values, again)]
    if "config.json" in draw.files:  # as in an exported model
        shutil.copy(folder / "config.json", saved)
    theirs, reference, others = of_transformers(saved, texts)
    points |= others
    _, again = of_lcjax(saved, reference)
    compare("AutoTokenizer of saved: ", saved, theirs, reference, again)
    names = ", ".join(sorted({question for question, _ in lines}))
    equal = DOCUMENTED + ", ".join(sorted(points)) if points else EXPECTED[0]
    return names or equal, [line for _, line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--only", type=int, help="number of the one folder to show")
    args = parser.parse_args()
    transformers.logging.set_verbosity(50)
    warnings.simplefilter("ignore")
    outcomes: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as root:
        for index in range(args.count) if args.only is None else [args.only]:
            draw = Draw(args.seed, index, args.kind)
            outcome, lines = run(args.seed, index, Path(root), args.kind)
            outcomes[draw.kind, outcome].append(index)
            if args.only is not None:
                for path in sorted(Path(root, "folder").rglob("*")):
                    if path.is_file() and path.suffix in (".json", ".jinja"):
                        print(f"--- {path.name}: {path.read_text()[:1500]}")
                print("\n".join(lines))
    totals = collections.Counter()
    for (_, outcome), cases in outcomes.items():
        totals[outcome] += len(cases)
    for (kind, outcome), cases in sorted(outcomes.items()):
        print(f"{len(cases):5} {kind:14} {outcome}: {', '.join(map(str, cases[:6]))}")
    for outcome, count in sorted(totals.items()):
        print(f"{count:5} {outcome}")


if __name__ == "__main__":
    main()
