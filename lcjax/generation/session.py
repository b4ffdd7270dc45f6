"""Sessions: a model, a KV cache, and chunks of tokens that are read into it.

Generation, scoring, conversations and shared prefixes all read text through `Session`. Lengths are
rounded up to a few sizes, because each size compiles a program.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention.inserted import InsertedTokens
from lcjax.checkpoints.tokenizer import Tokenizer
from lcjax.errors import InputError, check_integer
from lcjax.generation.inference_model import InferenceModel
from lcjax.generation.programs import InferenceJit
from lcjax.generation.readings import Reading, separated
from lcjax.generation.repetition import read_again
from lcjax.models import Decoder, ModelConfig, head
from lcjax.models import cache as cache_lib
from lcjax.models import decoder as decoder_lib
from lcjax.models.cache import Cache
from lcjax.models.layers import CollectKeyValues
from lcjax.models.memory import EncodedContext
from lcjax.parallel import distributed
from lcjax.parallel.sharding import keep_rows, padding_rows, replicated
from lcjax.rope import Rotation

# Maximum tokens of a row of packed texts, unless one text is longer: the program itself computes
# the table of visible blocks of a packed row, and the table grows with the square of the row.
MAX_PACKED_ROW = 8192


# Input checks


def check_rows(name: str, rows: Any, example: str) -> None:
    """Raises an InputError unless `rows` is a list, a tuple or an array, with an entry per text."""
    is_text = isinstance(rows, str | bytes)
    is_rows = isinstance(rows, Sequence | np.ndarray | jax.Array) and not is_text
    if not is_rows or not getattr(rows, "ndim", 1):
        raise InputError(f"{name}={_shorten(rows)} must be a list, such as {example}")


def check_token_ids(name: str, ids: Any, vocab_size: int) -> np.ndarray:
    """Returns `ids` as int32 [n].

    Raises:
      InputError: `ids` is not a list of token ids of the vocabulary; the message calls it `name`.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of unequal lengths
        array = np.zeros((1, 1))
    if array.ndim != 1:
        raise InputError(f"{name}={_shorten(ids)} must be a list of token ids, whole numbers")
    if array.dtype.kind not in "iu" or (isinstance(ids, list | tuple) and bool in map(type, ids)):
        for token in ids:
            check_integer(f"{name}: token", token, 0)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise InputError(f"{name}: token={outside[0]} must lie between 0 and {vocab_size - 1}")
    return array.astype(np.int32)


def pad_right(rows: Sequence[Sequence[int] | np.ndarray], width: int = 0) -> np.ndarray:
    """Returns token ids as int32 [B, T], with 0 after each row; T is at least `width`."""
    padded = np.zeros((len(rows), max(width, *map(len, rows))), np.int32)
    for out, row in zip(padded, rows, strict=True):
        out[: len(row)] = row
    return padded


def check_token_rows(tokens: Any, lengths: Any, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `tokens` as int32 [B, T] with 0 after `lengths`, and `lengths` as int [B].

    Raises:
      InputError: `tokens` or `lengths` (None: T for every row) are not whole numbers in the range
        that the vocabulary and T allow.
    """
    try:
        array = np.asarray(tokens)
    except ValueError:
        array = np.zeros(0)
    if array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        raise InputError(
            f"tokens={_shorten(tokens)} must be token ids, whole numbers in rows of one length"
            " [B, T]; pad shorter rows to that, and give lengths"
        )
    num_rows, width = array.shape
    try:
        lengths = np.full(num_rows, width) if lengths is None else np.asarray(lengths)
    except ValueError:
        lengths = np.zeros(0)
    is_valid = lengths.dtype.kind in "iu" and lengths.shape == (num_rows,)
    if not is_valid or (lengths < 0).any() or (lengths > width).any():
        raise InputError(
            f"lengths={_shorten(lengths)} must be {num_rows} whole numbers from 0 to the"
            f" {width} tokens of a row, one for each row"
        )
    array = np.where(np.arange(width) < lengths[:, None], array, 0)
    for row, ids in enumerate(array):
        check_token_ids(f"tokens[{row}]", ids, vocab_size)
    return array.astype(np.int32), lengths


def check_first(first: Any, width: int, least: int = 1) -> None:
    """Raises an InputError unless `first` is a position from `least` to the last of a row."""
    check_integer("first", first, least)
    if first >= width:
        raise InputError(f"first={first} must lie between {least} and the length {width} - 1")


def _shorten(value: Any) -> str:
    """Returns the first characters of `repr(value)`, on one line."""
    return " ".join(repr(value).split())[:60]


# Sizes


def round_up_to_bucket(length: int, per_octave: int = 8, least: int = 64) -> int:
    """Rounds `length` up to one of `per_octave` sizes (a power of two) between powers of two.

    The result is at least `least`; beyond that it exceeds `length` by less than the share
    1 / `per_octave`.
    """
    length = max(length, least)
    step = max((1 << (length - 1).bit_length()) // (2 * per_octave), 1)
    return -(-length // step) * step


def packing_saves(packed: int, padded: int) -> bool:
    """Returns whether `packed` tokens in packed rows cost less than `padded` tokens in padded rows.

    A saving of one bucket is not enough: which keys of a packed row are visible
    is only known when the program runs.
    """
    return 8 * packed <= 7 * padded


def prompt_bucket(length: int, chunk: int) -> int:
    """Rounds `length` up so that the odd chunk has 64, 96, 128, 192, 256, 384, ... tokens.

    Each size compiles a program, so few sizes serve all prompts; beyond 64 tokens at most a third
    of the odd chunk is padding.
    """
    whole, rest = divmod(length, chunk)
    return whole * chunk + (min(round_up_to_bucket(rest, 2), chunk) if rest else 0)


def prefill_chunk_size(chunk: int | None) -> int:
    """Returns `chunk`, or by default a size that fills a matrix unit and fits a CPU's caches."""
    if chunk is None:
        return 1024 if jax.default_backend() == "cpu" else 4096
    check_integer("prefill_chunk", chunk, 1, "leave it out for the default")
    return int(chunk)


def chunk_of_cache(config: ModelConfig, chunk: int) -> int:
    """Returns the tokens between two cuts of a cache policy, if it has such chunks, or `chunk`."""
    return chunk if config.cache is None else config.cache.chunk or chunk


def whole_prompt_bucket(length: int) -> int:
    """Rounds `length` up to the chunk size of a prompt (`ModelConfig.needs_whole_prompt`).

    The size is a multiple of 64, the block size of vertical_slash: padding shifts no block of it.
    """
    return round_up_to_bucket(length, 2, least=128)


def padded_chunks(length: int, chunk: int) -> list[int]:
    """Splits `length` into chunks; the odd chunk is first, where attention is cheap."""
    odd = length % chunk
    return [odd] * bool(odd) + [chunk] * (length // chunk)


def unpadded_chunks(length: int, chunk: int) -> list[int]:
    """Splits `length` into whole chunks, at most three of each power of four, and one of 2 to 5.

    A chunk has a single token only if `length` or `chunk` is as small, since caches may read it as
    a generated token (`lcjax.attention.pages`).
    """
    sizes, size = [chunk] * (length // chunk), 1
    rest = length % chunk
    while 4 * size <= rest:
        size *= 4
    while size > 1:
        sizes += [size] * (rest // size)
        rest, size = rest % size, size // 4
    if rest == 1 and sizes and chunk >= 5:
        return [*unpadded_chunks(length - 5, chunk), 5]
    return sizes + [rest] * bool(rest)


# Reading


@dataclasses.dataclass
class Session:
    """Rows of text that a model reads chunk by chunk, and the KV cache of what it has read.

    Attributes:
      cache: replaced by every call that reads, which donates the buffers of the previous cache.
      rotation: shared by all rows, or stacked.
      memory: the encoded context of the rows, including filler rows for the mesh.
      with_ffn_input: `read` returns logits with the input of the last feed-forward [B, D], and
        `score` gets `States`.
    """

    model: Decoder
    params: dict
    cache: Cache
    rotation: Rotation
    memory: EncodedContext | None = None
    with_ffn_input: bool = False

    def __post_init__(self):
        # jit compiles a program again for arguments that are committed to a device. Loaded weights
        # are, and with them the cache that a chunk returns, so the first cache has to be, too.
        weights = jax.tree.leaves(self.params)[0]
        if getattr(weights, "committed", False) and len(weights.devices()) == 1:
            self.cache = jax.device_put(self.cache, *weights.devices())

    def read(
        self,
        tokens: np.ndarray | jax.Array,
        segments: np.ndarray | None,
        positions: np.ndarray,
        ends: np.ndarray | None = None,
        *,
        sizes: Sequence[int] = (),
    ) -> jax.Array:
        """Reads `tokens` and returns float32 logits [B, V] of the next token.

        Args:
          tokens: int32 [B, T], the next tokens of every row; or [B], one token of every row. With
            `segments` [B, 2] an inserted token follows that token.
          segments: int32 [B, T], 0 for padding; None: no padding.
          positions: [B, T].
          ends: int [B], the token of each row whose logits are returned, counted from the end (1 is
            the last); None: the last.
          sizes: sizes of the chunks that are read one after another; empty: all at once.
        """
        for chunk in _split(sizes, tokens, segments, positions):
            logits, self.cache = _step_in_place(
                self.model, self.params, self.cache, *chunk, self.rotation, ends, self.memory,
                with_ffn_input=self.with_ffn_input,
            )  # fmt: skip
        return logits

    def read_from_first_column(
        self, tokens: np.ndarray, lengths: np.ndarray, sizes: Sequence[int]
    ) -> Any:
        """Reads texts with padding after them, so that a row has the chunks that it has alone.

        Args:
          tokens: int32 [B, T].
          lengths: int [B], tokens of each row.
          sizes: sizes of the chunks, T in all.

        Returns:
          What `read` returns for the last token of each row.
        """
        columns = np.arange(tokens.shape[1])
        segments = (columns < lengths[:, None]).astype(np.int32)
        positions = np.broadcast_to(columns, tokens.shape)
        last, start = None, 0
        for chunk, size in zip(_split(sizes, tokens, segments, positions), sizes, strict=True):
            ends = np.clip(size + start - lengths + 1, 1, size)
            output = self.read(*chunk, ends)
            is_here = (lengths > start)[:, None]  # later chunks of a row are padding
            if last is not None:
                output = jax.tree.map(functools.partial(jnp.where, is_here), output, last)
            last, start = output, start + size
        return last

    def end_prompt(
        self,
        new: int,
        chunk: int,
        texts: Sequence[Sequence[int]] = (),
        tokenizer: Tokenizer | None = None,
        *,
        start: int = 0,
        question: int | None = None,
    ) -> None:
        """Lets layers with a cache policy evict tokens of the prompt (`cache.end_prompt`).

        Args:
          new: maximum number of tokens that follow.
          chunk: maximum number of these that are read at once.
          texts: token ids of each row since the last cut, for policies that read them again.
          tokenizer: encodes what such a policy reads with them.
          start: order index of the first of these tokens.
          question: how many of the last tokens ask about the others; None: not known.
        """
        if not any(kind.acts_on_prompt for kind in self.cache.kinds):
            return
        if self.model.config.cache.reads_again:
            settings = self.model, self.params, self.cache, self.rotation
            self.cache = read_again(*settings, texts, start, tokenizer)
        rotations = tuple(map(self.rotation.of_kind, self.model.config.kind_by_layer))
        if question is not None:
            question = np.full(len(self.cache.tokens), question, np.int32)
        self.cache = cache_lib.end_prompt(
            self.cache, rotations, new, chunk, self.model.mesh, question
        )

    def read_ids(self, ids: np.ndarray, start: int, chunk: int) -> jax.Array:
        """Reads `ids` int32 [n], the same for every row, from position `start` on, without padding.

        Padding in the middle of a text would stay in the cache. A model that reads ahead reads all
        ids in one chunk, because it would choose keys for each chunk. Returns logits [B, V].
        """
        positions = start + np.arange(len(ids))
        tokens, positions = (np.tile(x, (len(self.cache.tokens), 1)) for x in (ids, positions))
        sizes = () if self.model.config.needs_whole_prompt else unpadded_chunks(len(ids), chunk)
        return self.read(tokens, None, positions, sizes=sizes)

    def score(
        self,
        tokens: np.ndarray,
        targets: np.ndarray,
        segments: np.ndarray,
        positions: np.ndarray,
        *,
        chunk: int,
        score: Callable[..., Any],
        in_place: bool = True,
    ) -> Any:
        """Reads `tokens` int32 [B, T] and scores the `targets` int32 [B, T] after each of them.

        With `in_place=False` the buffers of the old cache stay valid, so that other texts can
        continue from it. `score` is as in `lcjax.generation.scoring.score_texts`.

        Returns:
          What `score` returns, arrays [B, T, ...].
        """
        step, parts = _step_in_place if in_place else _step_to_new_cache, []
        sizes = [min(chunk, tokens.shape[1] - start) for start in range(0, tokens.shape[1], chunk)]
        for *columns, next_tokens in _split(sizes, tokens, segments, positions, targets):
            scores, self.cache = step(
                self.model, self.params, self.cache, *columns, self.rotation, None, self.memory,
                next_tokens, score=score, with_ffn_input=self.with_ffn_input,
            )  # fmt: skip
            parts.append(jax.tree.map(distributed.gather, scores))
        return jax.tree.map(lambda *arrays: np.concatenate(arrays, 1), *parts)


def _split(sizes: Sequence[int], *arrays: Any) -> Iterator[list[Any]]:
    """Yields the columns of `arrays` [B, T] for each of `sizes`; all at once without sizes."""
    if not sizes:
        yield list(arrays)
    for start, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
        yield [None if x is None else x[:, start : start + size] for x in arrays]


def _step(
    model, params, cache, tokens, segments, positions, rotation, ends, memory, targets=None,
    *, score=None, with_ffn_input=False,
):  # fmt: skip
    """Adds `tokens` to the cache, and returns logits [B, V], or the `score` of `targets` [B, T].

    `with_ffn_input` is as in `Session`.
    """
    mesh, inserted = model.mesh, model.config.pattern.inserted_tokens
    if tokens.ndim == 1:
        tokens = tokens[:, None]
        if segments is not None:
            tokens = jnp.concatenate([tokens, jnp.full_like(tokens, inserted.token)], 1)
    output = decoder_lib.apply(
        model,
        params,
        keep_rows(tokens, mesh),
        with_ffn_input=with_ffn_input,
        positions=keep_rows(positions, mesh),
        segments=segments,
        rotation=rotation,
        cache=cache,
        memory=memory,
    )
    hidden, cache = output.hidden, cache_lib.keep_layout(output.cache, mesh)
    if targets is not None:
        return score(hidden, head(params, model.config), keep_rows(targets, mesh)), cache
    at = (slice(None), -1) if ends is None else (jnp.arange(len(ends)), -ends)
    last = jax.tree.map(lambda x: x[at], hidden)
    ffn_input = None
    if with_ffn_input:
        last, ffn_input = last
    logits = model.apply({"params": params}, last, method="logits")
    if inserted is not None:
        logits = logits.at[:, inserted.token].set(-jnp.inf)  # inserted tokens are never predicted
    logits = keep_rows(logits, mesh)
    return (logits, ffn_input) if with_ffn_input else logits, cache


_STATIC = {"tokens": 3, "static_argnums": 0, "static_argnames": ("score", "with_ffn_input")}
# The first overwrites the buffers of the old cache; the second leaves them valid.
_step_in_place = InferenceJit(_step, **_STATIC, donate_argnums=2)
_step_to_new_cache = InferenceJit(_step, **_STATIC)
CACHED_LAYERS = "cache.layers"  # the path of keys and values among the arguments of `_step`


_NEW = 512  # tokens that follow a prompt in programs that are only compiled


def lower_cut(
    config: ModelConfig, mesh: jax.sharding.Mesh, rows: int, length: int, tokens: int
) -> jax.stages.Lowered:
    """Lowers the end of a prompt that was read `tokens` at once; arguments as in `lower_read`."""
    config = config.for_inference().replace(scan_layers=False)
    slots = cache_lib.whole_blocks(length)
    rotation = _abstract_rotation(config, mesh, length)
    return cache_lib.lower_cut(config, mesh, rows, slots, _NEW, rotation, tokens)


def _abstract_rotation(config: ModelConfig, mesh: jax.sharding.Mesh, length: int) -> Rotation:
    params, whole = decoder_lib.abstract_params(config, mesh), replicated(mesh)
    rotation = jax.eval_shape(lambda params: config.rotation(length, params.get("rope")), params)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), rotation)


def lower_read(
    config: ModelConfig, mesh: jax.sharding.Mesh, rows: int, length: int, tokens: int
) -> jax.stages.Lowered:
    """Lowers `Session.read` of the last `tokens` of `length`; the devices need not be present.

    Args:
      config: the config of the model.
      mesh: the devices that share weights, rows and caches.
      rows: rows of the batch, a multiple of the devices that share rows.
      length: tokens of a row, and slots of a full cache.
      tokens: 1 is a decoding step, after the end of a prompt; more are read with `segments`, like
        prompts with padding.

    Returns:
      The program, lowered for the shapes of weights, cache and tokens.
    """
    config = config.for_inference().replace(scan_layers=False)
    params, whole = decoder_lib.abstract_params(config, mesh), replicated(mesh)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

    rotation = _abstract_rotation(config, mesh, length)
    slots = cache_lib.whole_blocks(length)
    if tokens == 1:
        chunk = chunk_of_cache(config, 1)
        cache = cache_lib.abstract_after_prompt(
            config, rows, slots, _NEW, rotation, chunk=chunk, mesh=mesh
        )
    else:
        cache = cache_lib.abstract_cache(config, rows, slots, chunk=tokens, mesh=mesh)
    each = array(rows, tokens)
    # The abstract mesh names the device kind, by which kernels choose their implementation.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return _step_in_place.trace(
            *(Decoder(config, mesh), params, cache), array(rows) if tokens == 1 else each,
            None if tokens == 1 else each, each, rotation, None, None,
        ).lower()  # fmt: skip


# Prompts


def prefix_tokens_reused(lengths: Sequence[int], tokens: int, chunk: int) -> np.ndarray:
    """Returns how many of a prefix's `tokens` each row of a batch of prompts reuses, int [B].

    All rows end in the same column and are read from the same column on. So shorter rows read the
    end of the prefix again, and longer rows read the text after it, rounded up to a compiled size.
    """
    return np.maximum(np.array(lengths) - prompt_bucket(max(lengths) - tokens, chunk), 0)


class CachedPrefix(NamedTuple):
    """The KV cache of the common prefix of a batch, read with the rotation of all rows."""

    cache: cache_lib.Cache  # full, of one row without padding
    ids: np.ndarray  # int32 [n], the first tokens of the cache
    lm: InferenceModel  # the model that read it
    length: int  # number of tokens that its rotation was made for

    def __repr__(self) -> str:
        is_cut = any(kind.evicts for kind in self.cache.kinds)
        cut = ", some of them evicted" if is_cut else ""
        return f"{type(self).__name__}({self.tokens:,} tokens{cut}, for texts of {self.length:,})"

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def is_whole(self) -> bool:
        """Whether prompts may begin with a part of it, and not only with all of it.

        They may not if layers evicted tokens at its end, or keep a state or a window.
        """
        return all(kind.keeps_all for kind in self.cache.kinds)

    def check(
        self, config: ModelConfig, prompts: Sequence[Sequence[int]], *, context: Any, exact: bool
    ) -> None:
        """Raises an InputError if prompts cannot continue from this prefix.

        `exact` is whether rotations change while text is generated.
        """
        if not (can_share_prefix(config) or can_continue_prefix(config)):
            names = [type(pattern).__name__ for pattern in config.patterns]
            names += [type(x).__name__ for x in (config.cache, config.mixer) if x is not None]
            names = " or ".join(names)
            raise InputError(
                f"prefix: with {names} the keys that a token sees depend on other tokens of the"
                " prompt, so prompts cannot share a prefix; leave prefix out"
            )
        if context is not None or exact:
            name = "exact=True" if context is None else "context"
            raise InputError(f"prefix was read without {name}; leave one of the two out")
        for number, prompt in enumerate(prompts):
            ids = np.asarray(prompt)
            if len(ids) <= self.tokens or not np.array_equal(ids[: self.tokens], self.ids):
                raise InputError(
                    f"prompts[{number}] must begin with the {self.tokens} tokens of prefix and go"
                    " on; leave prefix out"
                )

    def check_keys(self, lm: InferenceModel, lengths: Sequence[int]) -> None:
        """Raises an InputError if `lm` reads requests of `lengths` tokens with other keys."""
        if lm.params is not self.lm.params:
            raise InputError(
                "prefix was read by another model; read it with the one that reads the prompts"
            )
        for name in ("rope", "pattern", "layers", "cache"):
            read_with, expected = getattr(self.lm.config, name), getattr(lm.config, name)
            if read_with != expected:
                raise InputError(
                    f"prefix was read with {name}={read_with!r}, and the prompts are read with"
                    f" {expected!r}; read the prefix with the model that reads the prompts (the"
                    " result of with_method)"
                )
        if not lm.depends_on_length:
            return
        lengths = {max(int(length), lm.length or 0) for length in lengths}
        rotation = self.lm.rotation(self.length)
        for length in lengths - {self.length}:
            if not rotation.equals(lm.rotation(length)):
                raise InputError(
                    f"prefix was read with the rotation for {self.length} tokens, and a prompt and"
                    f" its continuation need the rotation for {length}; read both with"
                    f" lm.with_method(length={max(lengths)})"
                )


def can_continue_prefix(config: ModelConfig) -> bool:
    """Returns whether prompts can continue what layers keep at the end of a prefix.

    If a cache policy cuts it there, that is not what they would read in full: their own tokens have
    no part in the choice.
    """
    kinds = cache_lib.layer_caches(config)
    kinds = [kinds[source] for source in config.key_sources]
    if not config.evicts:
        return config.is_position_based and all(kind.continues for kind in kinds)
    if config.cache.chunk is not None:
        return False
    return config.is_position_based and all(x.evicts or not x.keeps_all for x in kinds)


def can_share_prefix(config: ModelConfig) -> bool:
    """Returns whether visible keys depend only on positions, and the cache keeps all keys."""
    keeps_all = all(kind.keeps_all for kind in cache_lib.layer_caches(config))
    return config.is_position_based and keeps_all and not config.evicts


def read_prompts(
    lm: InferenceModel,
    prompts: Sequence[Sequence[int]],
    rotation: Rotation,
    *,
    num_new: int,
    chunk: int,
    rotated: bool | None = None,
    inserted: InsertedTokens | None = None,
    memory: EncodedContext | None = None,
    prefix: CachedPrefix | None = None,
    with_ffn_input: bool = False,
    keeps_new: bool = False,
    question: int | None = None,
) -> tuple[Any, Session]:
    """Reads prompts into a new cache.

    Args:
      lm: the model.
      prompts: token ids, one list for each row, including filler rows for the mesh.
      rotation: shared by all rows, or stacked.
      num_new: number of tokens that the cache has space for after the prompts.
      chunk: number of tokens that are read at once; ignored if the model reads ahead, which reads
        all of them, or if its cache policy has a chunk size.
      rotated: whether the cache keeps rotated keys; None: as the pattern requires.
      inserted: the inserted tokens of the model, which the prompts contain; None: there are none.
      memory: the encoded context of the rows.
      prefix: the cached common prefix of all prompts.
      with_ffn_input: as in `Session`.
      keeps_new: whether a cache policy keeps all tokens that are read after its cut of the prompts,
        in chunks of any size.
      question: how many of the last tokens of the prompts ask about the others; None: not known.

    Returns:
      What `Session.read` returns, float32 logits [B, V] of the token after each prompt, and the
      session to continue with.
    """
    if prefix is not None and not prefix.is_whole:
        return _read_after_end(lm, prompts, rotation, prefix, num_new, chunk, with_ffn_input)
    chunk = chunk_of_cache(lm.model.config, chunk)
    if lm.model.config.needs_whole_prompt and inserted is None:
        chunk = whole_prompt_bucket(max(map(len, prompts)))
    tokens, segments, padding, ends = _lay_out(prompts, chunk, inserted)
    width = tokens.shape[1]
    slots, first = cache_lib.whole_blocks(width + num_new), 0
    if prefix is not None:
        first = max(width - prompt_bucket(max(map(len, prompts)) - prefix.tokens, chunk), 0)
    if first:
        cache = cache_lib.branch(prefix.cache, np.int32(first), padding, slots, lm.mesh)
    else:
        options = {"chunk": chunk, "rotated": rotated, "mesh": lm.mesh}
        cache = cache_lib.create(lm.model.config, len(prompts), slots, **options)
    session = Session(lm.model, lm.params, cache, rotation, memory, with_ffn_input)
    positions = np.maximum(np.arange(width)[None] - padding[:, None], 0)
    lengths = [len(prompt) for prompt in prompts]
    is_plain = not first and inserted is None and memory is None and width <= chunk
    is_plain = is_plain and not with_ffn_input
    if is_plain and can_pack(lm.model, cache, lengths, width, rotation):
        return read_packed(session, prompts, segments, positions), session
    if any(kind.acts_on_chunk for kind in cache.kinds):
        sizes = padded_chunks(width, chunk)[::-1]
        tokens = pad_right(prompts, width)
        return session.read_from_first_column(tokens, np.array(lengths), sizes), session
    columns = [x[:, first:] for x in (tokens, segments, positions)]

    def read():
        output = session.read(*columns, ends, sizes=padded_chunks(width - first, chunk))
        return Reading(output, session.cache)

    is_alone = not first and inserted is None and memory is None and not with_ffn_input
    is_cut = is_alone and any(kind.acts_on_prompt for kind in cache.kinds)
    next_chunk = num_new if keeps_new else chunk
    if lm.readings is None or not is_cut:
        reading = read()
    else:
        settings = lm.model.config, prompts, lm.length, chunk, session.cache
        reading = lm.readings.read(*settings, read)
        session.cache = reading.cache
    session.end_prompt(num_new, next_chunk, prompts, lm.tokenizer, question=question)
    if lm.readings is not None:
        session.cache = separated(session.cache, reading.cache)
    return reading.logits, session


def _read_after_end(lm, prompts, rotation, prefix: CachedPrefix, num_new, chunk, with_ffn_input):
    """Reads what follows a prefix; what was cut is not cut again at the end of the prompts."""
    rest = [prompt[prefix.tokens :] for prompt in prompts]
    tokens, segments, padding, _ = _lay_out(rest, chunk, None)
    width = tokens.shape[1]
    cache = cache_lib.repeat_row(prefix.cache, len(rest), width, num_new, chunk, lm.mesh)
    session = Session(lm.model, lm.params, cache, rotation, with_ffn_input=with_ffn_input)
    positions = prefix.tokens + np.maximum(np.arange(width)[None] - padding[:, None], 0)
    return session.read(tokens, segments, positions, sizes=padded_chunks(width, chunk)), session


def _lay_out(prompts, chunk: int, inserted: InsertedTokens | None):
    """Returns tokens and segments int32 [B, T], padding [B] before prompts, and `ends` (`read`)."""
    longest = prompt_bucket(max(map(len, prompts)), chunk)
    if inserted is not None:
        return inserted.aligned(prompts, longest)
    tokens = np.zeros((len(prompts), longest), np.int32)
    padding = np.array([longest - len(prompt) for prompt in prompts])
    for row, prompt in enumerate(prompts):
        tokens[row, padding[row] :] = prompt
    segments = (np.arange(longest)[None] >= padding[:, None]).astype(np.int32)
    return tokens, segments, padding, None


def can_pack(
    model: Decoder, cache: Cache, lengths: Sequence[int], width: int, rotation: Rotation
) -> bool:
    """Returns whether prompts can be read as one packed row, at less cost than rows of `width`.

    A single prompt is not packed, because unpacked prompts have fewer compiled sizes.
    """
    config = model.config
    if len(lengths) == 1 or sum(lengths) > MAX_PACKED_ROW:
        return False
    if not packing_saves(round_up_to_bucket(sum(lengths)), len(lengths) * width):
        return False
    if model.mesh is not None or config.position == "learned":
        return False
    holds_keys_only = all(kind.holds_keys_only for kind in cache.kinds)
    if not holds_keys_only or not config.is_position_based:
        return False
    return rotation.inv_freq.ndim == 1


def read_packed(
    session: Session,
    prompts: Sequence[Sequence[int]],
    segments: np.ndarray,
    positions: np.ndarray,
) -> jax.Array:
    """Reads prompts as one packed row into the empty cache of `session`.

    All prompts end at slot T of the cache, with `segments` and `positions` [B, T]. Returns the
    logits [B, V] after each prompt.
    """
    lengths, slots = np.array([len(prompt) for prompt in prompts]), segments.shape[1]
    ends, total = np.cumsum(lengths), int(lengths.sum())
    starts = ends - lengths
    rows = {
        "tokens": np.concatenate(prompts),
        "segments": np.repeat(np.arange(1, len(lengths) + 1), lengths),
        "positions": np.arange(total) - np.repeat(starts, lengths),
    }
    packed = {
        name: np.pad(x, (0, round_up_to_bucket(total) - total))[None].astype(np.int32)
        for name, x in rows.items()
    }
    # The place in the packed row whose keys and values go to each slot. Slots before a prompt may
    # hold anything: segments mask them.
    source = np.maximum(ends[:, None] - slots + np.arange(slots), starts[:, None])
    packed["source"] = source.reshape(1, -1).astype(np.int32)
    logits, session.cache = _read_packed(
        session.model, session.params, session.cache, packed, (ends - 1).astype(np.int32), segments,
        positions, session.rotation,
    )  # fmt: skip
    return logits


@functools.partial(InferenceJit, static_argnums=0, donate_argnums=2)
def _read_packed(model, params, cache, packed, ends, segments, positions, rotation):
    is_rotated = any(kind.rotated for kind in cache.kinds)
    key_positions = positions.reshape(1, -1) if is_rotated else None
    output = model.apply(
        {"params": params}, packed["tokens"], positions=packed["positions"],
        segments=packed["segments"], rotation=rotation,
        collect=CollectKeyValues(packed["source"], key_positions),
    )  # fmt: skip

    cache, _ = cache_lib.extend(cache, segments, positions)
    cache = cache_lib.write_packed(cache, output.key_values)
    logits = model.apply({"params": params}, output.hidden[0, ends], method="logits")
    return logits, cache


def fill_rows(model: Decoder, rows: Sequence[Any]) -> list[Any]:
    """Returns `rows` and copies of the first row, so that all devices get equally many rows."""
    return [*rows, *[rows[0]] * padding_rows(model.mesh, len(rows))]
