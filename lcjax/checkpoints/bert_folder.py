"""Reads and writes BERT encoders: transformers' `BertModel`, DPR, sentence-transformers, ColBERT.

A folder of sentence-transformers also describes how token vectors become one vector:
`modules.json`, `1_Pooling/config.json`, `2_Normalize`, `sentence_bert_config.json` (the longest
text) and `config_sentence_transformers.json` (the prefixes of queries and passages).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lcjax.checkpoints.hf_files import check_folder_sums, read_hf_json
from lcjax.checkpoints.hf_names import Entry, entries_of
from lcjax.checkpoints.hf_save import HF_FOLDER, WeightStream, check_space
from lcjax.checkpoints.safetensors_io import SafetensorsFolder, has_weights
from lcjax.checkpoints.tokenizer import check_text, fingerprint
from lcjax.checkpoints.torch_pickle import TorchFolder, bin_files
from lcjax.checkpoints.weights import (
    DTYPES,
    RenamedSource,
    Rows,
    WeightSource,
    check_tensors,
    read_leaves,
    read_tensor,
    resolve_names,
)
from lcjax.errors import InputError, check_integer, check_one_of
from lcjax.files import (
    CHECKSUMS,
    atomic_folder,
    check_destination,
    check_path,
    parse_json,
    read_json,
    write_hf_json,
)
from lcjax.models.bert import BertConfig
from lcjax.parallel import distributed
from lcjax.storage import to_path

POOLINGS = ("mean", "cls", "max")
_POOLING_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
_SIMILARITIES = (None, "cosine", "dot", "dot_score")
_WORDS = "embeddings.word_embeddings.weight"
_SPECIAL = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"}
# Tokenizer classes whose `vocab.txt` is a WordPiece vocabulary; others split words differently.
_WORDPIECE_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
_WORDPIECE_PREFIXES = ("Bert", "DPR", "Retri", "Electra", "MobileBert")
_NOT_WORDPIECE = ("BertJapanese", "BertGeneration", "Bertweet")


@dataclasses.dataclass(frozen=True)
class SentenceModules:
    """The settings in the files of sentence-transformers: pooling, normalization and prefixes."""

    pooling: str  # one of POOLINGS
    normalize: bool  # whether vectors have unit length
    query_prefix: str | None = None  # None: the folder does not state it
    passage_prefix: str | None = None


_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
_FILES = (
    *HF_FOLDER.files,
    *_TOKENIZER_FILES,
    *("modules.json", "1_Pooling/config.json", "2_Normalize/*"),
    *("sentence_bert_config.json", "config_sentence_transformers.json"),
)
BERT_FOLDER = dataclasses.replace(HF_FOLDER, name="the folder of an encoder", files=_FILES)
BERT_FOLDERS = dataclasses.replace(
    HF_FOLDER,
    name="the folder of two encoders",
    files=(*(f"{name}/{file}" for name in ("query", "passage") for file in _FILES), CHECKSUMS),
    config="passage/config.json",
)


def bert_entries(config: BertConfig, *, older_names: bool = True) -> tuple[Entry, ...]:
    """Returns the leaves of a BERT's tree; `older_names` as in `BertConfig.hf_rows`."""
    rows = config.hf_rows(older_names=older_names)
    return entries_of(rows, config.hf_axes(), range(config.num_layers))


class BertFolder:
    """Config, weights, tokenizer and modules of a folder; only `params` reads all weights."""

    def __init__(self, folder: str | Path, *, allow_pickle: bool = False):
        """Opens a folder.

        Args:
          folder: the folder of the checkpoint.
          allow_pickle: whether `.bin` files are read (with a restricted reader).

        Raises:
          InputError: the folder holds no BERT, or is damaged.
        """
        root = self.path = to_path(folder)
        check_folder_sums(root)
        self._module_list = read_modules(root)
        if self._module_list:
            kind, path = self._module_list[0]
            if kind != "Transformer":
                raise InputError(f"{root / 'modules.json'}: begins with {kind}, not Transformer")
            root = root / path
        file = root / "config.json"
        if not file.is_file():
            raise InputError(f"{file}: no such file; is this the folder of a BERT encoder?")
        self.hf = read_hf_json(file)
        self.config = BertConfig.from_hf(self.hf, str(file))
        self.source = _open_weights(root, allow_pickle)
        self.tokenizer = BertTokenizer.open(root)
        self.tokenizer_files = {
            name: (root / name).read_bytes() for name in _TOKENIZER_FILES if (root / name).is_file()
        }
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise InputError(
                f"{root}: the tokenizer has {self.tokenizer.vocab_size} ids, but the model only"
                f" {self.config.vocab_size} embedding rows; use the tokenizer of this model"
            )
        self.max_tokens = self._max_tokens(root)

    @property
    def is_dpr(self) -> bool:
        return self.hf["model_type"] == "dpr"

    def _max_tokens(self, root: Path) -> int:
        """Returns the tokens of the longest text that files and model allow, with special ones."""
        settings = read_hf_json(root / "tokenizer_config.json", {})
        file = root / "sentence_bert_config.json"
        sentence = read_json(file, {})
        longest = sentence.get("max_seq_length")
        if longest is not None:
            check_integer(f"{file}: max_seq_length", longest, 8)
        if sentence.get("do_lower_case"):
            self.tokenizer.lowercase = True
        sizes = (self.config.max_length, longest, settings.get("model_max_length"))
        return min(int(size) for size in sizes if size is not None)

    @cached_property
    def modules(self) -> SentenceModules | None:
        """How token vectors become one vector; None: the folder does not state it."""
        if not self._module_list:
            # DPR's encoders are trained on the vector of [CLS] without normalization.
            return SentenceModules("cls", normalize=False) if self.is_dpr else None
        pooling, normalize = None, False
        for kind, path in self._module_list[1:]:
            if kind == "Pooling" and pooling is None:
                pooling = _read_pooling(self.path / path / "config.json")
            elif kind == "Normalize" and pooling is not None:
                normalize = True
            else:
                raise InputError(
                    f"{self.path / 'modules.json'}: module {kind} is not supported here; an encoder"
                    " is Transformer, Pooling and perhaps Normalize"
                )
        if pooling is None:
            raise InputError(f"{self.path / 'modules.json'}: has no Pooling after the Transformer")
        file = self.path / "config_sentence_transformers.json"
        settings = read_json(file, {})
        if (similarity := settings.get("similarity_fn_name")) not in _SIMILARITIES:
            raise InputError(
                f"{file}: similarity_fn_name={similarity!r:.40} is no product of two vectors;"
                " encoders for cosine and dot are supported"
            )
        prompts = settings.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
            raise InputError(f"{file}: prompts={prompts!r:.40} must be texts by their names")
        name = settings.get("default_prompt_name")
        if name is not None and name not in prompts:
            raise InputError(f"{file}: default_prompt_name={name!r:.40} is no key of prompts")
        default = prompts.get(name)  # for kinds of texts without a prompt of their own
        passage = next(
            (prompts[k] for k in ("passage", "document", "corpus") if k in prompts), default
        )
        # Scores are products of vectors: those of an encoder for cosine have unit length.
        normalize = normalize or similarity == "cosine"
        return SentenceModules(pooling, normalize, prompts.get("query", default), passage)

    @cached_property
    def _prefix(self) -> str:
        """The common prefix of BERT's tensor names: "", "bert.", "ctx_encoder.bert_model."."""
        prefixes = [n.removesuffix(_WORDS) for n in self.source.tensors if n.endswith(_WORDS)]
        if len(prefixes) != 1:
            problem = f"has {len(prefixes)} tensors" if prefixes else "has no tensor"
            raise InputError(
                f"{self.source.path}: {problem} named {_WORDS}, where a BERT has one; check that"
                " config.json and weights belong together"
            )
        return prefixes[0]

    def params(self, config: BertConfig, mesh: jax.sharding.Mesh | None) -> dict:
        """Returns the parameters of `config`, in float32, sharded by the rules of `parallel`.

        Raises:
          InputError: tensors are missing, have other shapes, or hold NaN or infinity.
        """
        names = {
            name.removeprefix(self._prefix): name
            for name in self.source.tensors
            if name.startswith(self._prefix)
        }
        parts = ("embeddings.", "encoder.", *(("pooler.",) if config.pooler else ()))
        names = {
            name: stored
            for name, stored in names.items()
            if name.startswith(parts) and not name.endswith("position_ids")
        }
        source = RenamedSource(
            self.source, {name: [Rows(stored)] for name, stored in names.items()}
        )
        table = bert_entries(config)
        source = resolve_names(source, table)
        check_tensors(source, table)
        return read_leaves(source, table, "float32", mesh=mesh)

    def head(self, name: str, outputs: int | None = None, *, bias: bool) -> dict[str, np.ndarray]:
        """Returns the kernel [D, outputs], and the bias, of a linear layer over hidden states.

        Args:
          name: name of the layer; its tensors are `{name}.weight` and `{name}.bias`.
          outputs: the number of rows that the weight must have; None: any.
          bias: whether the layer has a bias.

        Raises:
          InputError: the folder has no such layer, or its shape differs.
        """
        weight, width = read_tensor(self.source, f"{name}.weight"), self.config.width
        rows = weight.shape[0] if outputs is None else outputs
        if weight.shape != (rows, width):
            raise InputError(
                f"{self.source.path}: {name}.weight is {list(weight.shape)}, not"
                f" {[rows, width]}; use a model with {rows} outputs"
            )
        layer = {"kernel": weight.T}
        if bias:
            layer["bias"] = read_tensor(self.source, f"{name}.bias")
            if layer["bias"].shape != (rows,):
                raise InputError(f"{self.source.path}: {name}.bias must have {rows} numbers")
        return layer


@dataclasses.dataclass(frozen=True)
class BertWeights:
    """A BERT to be written: its weights, and the folder that config and tokenizer come from."""

    params: dict  # of `config`; LoRA adapters are merged
    config: BertConfig
    origin: BertFolder

    def stream(self, dtype: str) -> WeightStream:
        """Returns the tensors in `dtype`, under the names that transformers writes."""
        table = bert_entries(self.config, older_names=False)
        return WeightStream(self.params, table, dtype, lora=self.config.lora)


def save_bert(
    folder: str | Path,
    berts: BertWeights | Mapping[str, BertWeights],
    modules: SentenceModules,
    *,
    max_tokens: int,
    dtype: str = "float32",
    overwrite: bool = False,
    checksums: bool = False,
) -> Path:
    """Writes a folder that lcjax, sentence-transformers and transformers open with equal vectors.

    All processes must call this: each holds a part of the weights, and the first one writes.

    Args:
      folder: the folder to create.
      berts: one encoder; or two, `query` and `passage`, which are written to folders of these
        names.
      modules: how token vectors become one vector, and the prefixes.
      max_tokens: number of tokens of the longest text.
      dtype: dtype of the stored weights.
      overwrite: whether to replace a folder that this function wrote.
      checksums: whether to add the SHA-256 sums of all files.

    Returns:
      The folder.
    """
    check_path("folder", folder)
    folder = to_path(folder)
    check_one_of("dtype", dtype, DTYPES)
    berts = {"": berts} if isinstance(berts, BertWeights) else berts
    weights = {name: bert.stream(dtype) for name, bert in berts.items()}
    if not distributed.is_main_process():
        for stream in weights.values():
            stream.gather()
        return folder
    contents = BERT_FOLDER if "" in berts else BERT_FOLDERS
    check_destination(folder, contents, overwrite)
    check_space(folder, sum(stream.nbytes for stream in weights.values()))
    with atomic_folder(folder, contents, overwrite, checksums=checksums) as partial:
        for name, bert in berts.items():
            path = partial / name
            for inner in ("", "1_Pooling", *(["2_Normalize"] if modules.normalize else [])):
                (path / inner).mkdir(exist_ok=True)
            for file, content in bert.origin.tokenizer_files.items():
                (path / file).write_bytes(content)
            _write_modules(path, modules, bert, max_tokens)
            weights[name].write(path)
            write_hf_json(path / "config.json", _config_to_hf(bert, dtype))
    return folder


def _config_to_hf(bert: BertWeights, dtype: str) -> dict[str, Any]:
    """Returns `config.json` of a `BertModel`, with the keys of the origin that still apply."""
    architecture = {"architectures": ["BertModel"], "model_type": "bert"}
    dtypes = {"dtype": dtype, "torch_dtype": dtype}
    hf = bert.origin.hf | architecture | dtypes | bert.config.hf_sizes()
    dropped = ("transformers_version", "projection_dim", "_name_or_path")
    return {key: value for key, value in hf.items() if key not in dropped}


def _write_modules(
    path: Path, modules: SentenceModules, bert: BertWeights, max_tokens: int
) -> None:
    names = ["Transformer", "Pooling"] + ["Normalize"] * modules.normalize
    paths = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": i, "name": str(i), "path": inner, "type": f"sentence_transformers.models.{name}"}
        for i, (name, inner) in enumerate(zip(names, paths))
    ]
    write_hf_json(path / "modules.json", listed)
    modes = {key: name == modules.pooling for key, name in _POOLING_KEYS.items()}
    pooling = {"word_embedding_dimension": bert.config.width} | modes | {"include_prompt": True}
    write_hf_json(path / "1_Pooling" / "config.json", pooling)
    lowercase = bert.origin.tokenizer.lowercase
    sentence = {"max_seq_length": max_tokens, "do_lower_case": lowercase}
    write_hf_json(path / "sentence_bert_config.json", sentence)
    settings = {
        "prompts": {
            "query": modules.query_prefix or "",
            "document": modules.passage_prefix or "",
        },
        "default_prompt_name": None,
        "similarity_fn_name": "cosine" if modules.normalize else "dot",
    }
    write_hf_json(path / "config_sentence_transformers.json", settings)


class BertTokenizer:
    """WordPiece (or the tokenizer in `tokenizer.json`) with the special tokens of BERT.

    `encode` reads no special tokens: "[SEP]" typed by a user becomes ordinary tokens, as everywhere
    in lcjax. transformers reads it as the special token.
    """

    def __init__(self, backend: Any, special: dict[str, str], where: str):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend, self.lowercase = backend, False
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        for role, text in special.items():
            if backend.token_to_id(text) is None and role != "unk":
                raise InputError(f"{where}: the tokenizer has no {text} ({role}_token)")
        ids = {role: backend.token_to_id(text) for role, text in special.items()}
        self.cls_id, self.sep_id, self.pad_id = ids["cls"], ids["sep"], ids["pad"]
        self.mask_id = ids["mask"]

    @classmethod
    def open(cls, folder: Path) -> "BertTokenizer":
        """Opens `tokenizer.json`, else `vocab.txt`.

        Raises:
          InputError: there is neither, or it is damaged or of another kind.
        """
        from tokenizers import Tokenizer as Backend

        settings = read_hf_json(folder / "special_tokens_map.json", {})
        settings |= read_hf_json(folder / "tokenizer_config.json", {})
        special = {}
        for role, default in _SPECIAL.items():
            token = settings.get(f"{role}_token") or default
            special[role] = str(token.get("content") if isinstance(token, dict) else token)
        file = folder / "tokenizer.json"
        if file.is_file():
            try:
                return cls(Backend.from_str(json.dumps(read_json(file))), special, str(file))
            except InputError:
                raise
            except Exception as error:  # the package raises nothing narrower
                raise InputError(f"{file}: not a tokenizer.json, or truncated ({error})") from error
        file = folder / "vocab.txt"
        if not file.is_file():
            raise InputError(f"{folder}: no tokenizer.json and no vocab.txt; copy the tokenizer")
        return cls(_wordpiece(file, settings, special), special, str(file))

    @property
    def fingerprint(self) -> str:
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return fingerprint(vocabulary, lambda text: self.encode([text])[0])

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token's string; None if there is no such token."""
        return self._backend.token_to_id(token)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of every text, without special tokens."""
        for text in texts:
            check_text(text)
        if self.lowercase:
            texts = [text.lower() for text in texts]
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def _wordpiece(file: Path, settings: dict[str, Any], special: dict[str, str]) -> Any:
    """Builds the `tokenizers` form of transformers' `BertTokenizer` from its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

    kind = settings.get("tokenizer_class")
    is_known = kind in _WORDPIECE_CLASSES or (
        isinstance(kind, str)
        and kind.startswith(_WORDPIECE_PREFIXES)
        and not kind.startswith(_NOT_WORDPIECE)
    )
    if not is_known:
        raise InputError(
            f"{file.parent}: tokenizer_class={kind!r:.40} cuts words by rules of its own; save it"
            " as tokenizer.json (AutoTokenizer.from_pretrained(X).save_pretrained(Y))"
        )
    try:
        with file.open(encoding="utf-8") as lines:  # str.splitlines would cut at U+2028, too
            words = [line.rstrip("\n") for line in lines]
    except ValueError as error:
        raise InputError(f"{file}: not text ({error}); download it again") from error
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unk"]))
    lowercase = settings.get("do_lower_case", True)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase,
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokens = [text for text in special.values() if text in vocabulary]
    backend.add_special_tokens([AddedToken(text, special=True) for text in tokens])
    return backend


def _open_weights(folder: Path, allow_pickle: bool) -> WeightSource:
    if has_weights(folder):
        return SafetensorsFolder(folder)
    pickles = bin_files(folder)
    if not pickles:
        raise InputError(
            f"{folder}: no weights (*.safetensors) beside config.json; download them (from the hub"
            " allow_pickle=True also fetches pytorch_model.bin)"
        )
    if not allow_pickle:
        raise InputError(
            f"{folder}: its weights are pickles ({pickles[0].name}), which can run any code when"
            " opened; allow_pickle=True reads them with a reader that refuses all but tensors"
        )
    return TorchFolder(folder)


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Returns kind and path of each module of `modules.json`; empty without that file."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        modules = parse_json(file.read_text(encoding="utf-8"))
        listed = [(module["type"].rpartition(".")[2], module["path"]) for module in modules]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file}: not a list of modules of sentence-transformers ({error}); download it again"
        ) from error
    if not listed:
        raise InputError(f"{file}: names no module; download it again")
    if outside := [
        p for _, p in listed if not isinstance(p, str) or (p not in ("", ".") and Path(p).name != p)
    ]:
        raise InputError(f"{file}: names a path outside its folder: {outside[0]!r:.40}")
    return listed


def _read_pooling(file: Path) -> str:
    """Returns the pooling that a `1_Pooling/config.json` names."""
    settings = read_json(file)
    modes = [key for key, on in settings.items() if key.startswith("pooling_mode_") and on]
    if isinstance(settings.get("pooling_mode"), str):
        modes = [settings["pooling_mode"]]
    pooling = {**_POOLING_KEYS, **{name: name for name in POOLINGS}}.get(
        modes[0] if len(modes) == 1 else None
    )
    if pooling is None or settings.get("include_prompt") is False:
        problem = "include_prompt=false" if pooling else f"pooling {', '.join(modes) or 'nothing'}"
        raise InputError(f"{file}: {problem} is not supported; one of {', '.join(POOLINGS)} is")
    return pooling
