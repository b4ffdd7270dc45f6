"""What a model costs before it runs: parameters, FLOPs per token, cache bytes; and device peaks.

FLOPs count multiplications and additions of matrix products only, two per multiply-add (Kaplan et
al. 2020, arXiv 2001.08361, sec. 2.1; Chowdhery et al. 2022, PaLM, appendix B). What an
implementation repeats (rematerialisation) or does in vain (masked blocks) is not counted, so
FLOPs / (time * peak) is the *model* FLOPs utilisation.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import AttentionMetadata
from lcjax.models import Decoder, ModelConfig
from pallas_kernels import by_heads

# Dense peak FLOP/s of one device in bfloat16 with float32 sums, from the vendors' data sheets.
# The first name that stands as whole words in `device.device_kind`, lower case, counts.
PEAK_FLOPS = (
    ("tpu7x", 2_307e12),
    ("tpu v6", 918e12),
    ("tpu v5p", 459e12),
    ("tpu v5 lite", 197e12),
    ("tpu v5e", 197e12),
    ("tpu v5", 459e12),  # v5p reports itself as "TPU v5"
    ("tpu v4", 275e12),
    ("tpu v3", 123e12),
    ("tpu v2", 46e12),
    ("gb200", 2_500e12),
    ("b200", 2_250e12),
    ("gh200", 989e12),
    ("h200", 989e12),
    ("h100 pcie", 756e12),
    ("h100 nvl", 835e12),
    ("h100", 989e12),
    ("a100", 312e12),
    ("l40s", 362e12),
    ("l40", 181e12),
    ("l4", 121e12),
    ("a10g", 70e12),
    ("v100", 125e12),
    ("t4", 65e12),
)

_SAMPLED_QUERIES = 256


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts for one model at one length; FLOPs are per token, averaged over the sequence."""

    parameters: int
    trained_parameters: int
    parameter_bytes: int
    matmul_flops: float  # forward, through weight matrices, the head included
    attention_flops: float  # forward, queries with keys and weights with values
    weight_gradient_flops: float  # backward, for the trained weights only
    idle_flops: float  # backward, of activations before which nothing is trained: not needed
    kv_cache_bytes: int  # of one sequence of that length: what may still be seen, and notes of it

    @property
    def forward_flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    @property
    def training_flops(self) -> float:
        """Forward, the gradients of activations, and those of the trained weights.

        Attention has two products forward and four backward. With every weight trained this is
        the familiar three times forward; with adapters on frozen weights it is nearer two.
        """
        activations = self.matmul_flops + 2 * self.attention_flops - self.idle_flops
        return self.forward_flops + activations + self.weight_gradient_flops


def estimate(
    config: ModelConfig,
    length: int,
    *,
    trained=lambda path: True,
    context: tuple[int, int] | None = None,
) -> Cost:
    """The cost of `config` on sequences of `length` tokens.

    `trained(path)` says which parameters are trained: `layers/attention/query/kernel`, ...
    `context`: chunks, and tokens of each, that a model with a memory encodes for a sequence;
    without, nothing is encoded or read.
    """
    shapes = parameter_shapes(config)
    memory = _context_flops(config, length, context, trained)
    matmul, weight_gradients = 0.0, 0.0
    parameters = trained_parameters = nbytes = 0
    for path, leaf in shapes.items():
        size = math.prod(leaf.shape)
        parameters += size
        nbytes += size * leaf.dtype.itemsize
        trained_parameters += size if trained(path) else 0
        product = path.endswith(("/kernel", "/lora_a", "/lora_b")) or (
            # Reading a row of the table is no product; a tied head is one.
            path == "embed/embedding" and config.tie_embeddings
        )
        flops = 2 * size * _share_of_tokens(config, path, length, context) if product else 0
        matmul += flops
        weight_gradients += flops if trained(path) else 0
    per_pair = 4 * config.num_heads * config.head_dim  # one product for the logits, one for values
    window = config.pattern.for_inference().cache_window()
    cached = length if window is None else min(length, sum(window))
    cache_width = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    return Cost(
        parameters=parameters,
        trained_parameters=trained_parameters,
        parameter_bytes=nbytes,
        matmul_flops=matmul,
        attention_flops=config.num_layers * per_pair * visible_keys(config, length)
        + memory.attention,
        weight_gradient_flops=weight_gradients,
        idle_flops=memory.idle,
        kv_cache_bytes=config.num_layers * (cache_width * cached + note_bytes(config, cached)),
    )


def _share_of_tokens(
    config: ModelConfig, path: str, length: int, context: tuple[int, int] | None
) -> float:
    """How many tokens a weight multiplies for each token of the sequence."""
    if config.memory is not None and config.memory.is_prefix:
        return _share_before(config.memory, path, length, context)
    encoded = 0 if context is None else math.prod(context) / length
    if path.startswith("encoder/head/"):
        return 0.0  # its states are read, not its logits
    if path.startswith("encoder/") or re.search(r"/memory/(key|value)/", path):
        return encoded
    return float(context is not None) if "/memory/" in path else 1.0


def _share_before(memory, path: str, length: int, context: tuple[int, int] | None) -> float:
    """The same with a memory of windows, which the decoder itself reads."""
    own, (chunks, size) = "/memory/" in path, context or (0, 0)
    if not path.startswith("layers"):
        return 1.0
    read = memory.tokens_read(size) if context else 0
    if memory.attention is not None and "/attention/" in path:  # its tokens have their own
        read = read - size if own else size
    return float(not own) + chunks * read / length


class _Reading(NamedTuple):
    """FLOPs per token of the sequence for which no weight stands."""

    attention: float = 0.0  # within chunks, and of the decoder to all of them
    idle: float = 0.0


def _context_flops(
    config: ModelConfig, length: int, context: tuple[int, int] | None, trained
) -> _Reading:
    """What the attention of a memory adds, and what its backward pass leaves out."""
    if config.memory is None or context is None:
        return _Reading()
    if config.memory.is_prefix:
        return _Reading(attention=_attention_before(config, length, context))
    states, encoded = config.memory.states, math.prod(context)
    within = 4 * states.num_heads * states.head_dim * _seen_within(config, context[1])
    within *= states.num_layers * encoded / length
    num_slots = context[0] * config.memory.num_slots(context[1])
    across = 4 * config.num_heads * config.head_dim * num_slots
    across *= sum(config.memory.reader_layers(config.num_layers))
    shapes = parameter_shapes(config)
    searched = _search_flops(config, length, context, shapes)
    if any(trained(path) for path in shapes if path.startswith("encoder/")):
        return _Reading(within + across + searched, 2 * searched)
    before = sum(
        2 * math.prod(leaf.shape) * _share_of_tokens(config, path, length, context)
        for path, leaf in shapes.items()
        if path.endswith("/kernel") and re.search(r"^encoder/|/memory/(key|value)/", path)
    )
    return _Reading(within + across + searched, before + 2 * within + 2 * searched)


def _attention_before(config: ModelConfig, length: int, context: tuple[int, int]) -> float:
    """Of windows, each behind what is kept of those before, and of the text behind all of them."""
    (chunks, size), memory = context, config.memory
    num_slots = memory.num_slots(size)
    seen = visible_keys(config, size) + (chunks - 1) / 2 * num_slots
    pairs = chunks * memory.tokens_read(size) * seen / length + chunks * num_slots
    return 4 * config.num_heads * config.head_dim * config.num_layers * pairs


def _seen_within(config: ModelConfig, chunk: int) -> float:
    """Keys that a token sees while its chunk is encoded, on average."""
    memory = config.memory
    return sum(size * visible_keys(memory.states, size) for size in memory.parts(chunk)) / chunk


def _search_flops(
    config: ModelConfig, length: int, context: tuple[int, int], shapes: Mapping
) -> float:
    """Of choosing nodes: one layer over the halves of each level, and over the question."""
    memory = config.memory
    if not memory.query_dependent:
        return 0.0
    tokens = [context[1] >> level for level in range(memory.tree.depth - 1)]
    layers = [leaf.shape for path, leaf in shapes.items() if path.startswith("encoder/layers/")]
    each = 2 * sum(math.prod(shape[1:]) for shape in layers if len(shape) > 2)
    pair = 4 * config.num_heads * config.head_dim
    found = sum(context[0] * size * (each + pair * size / 4) for size in tokens)
    return found / length + each + pair * visible_keys(config, length)


def note_bytes(config: ModelConfig, slots: int, *, heads: int | None = None) -> int:
    """What a layer's cache of `slots` keys keeps besides keys and values, for one sequence.

    Notes are float32, of all query heads or of `heads`.
    """
    notes = config.pattern.for_inference().cache_state_shapes(slots, config.head_dim)
    return 4 * (config.num_heads if heads is None else heads) * sum(a * b for a, b in notes)


@functools.lru_cache(maxsize=64)  # the start of a run asks for them several times
def parameter_shapes(config: ModelConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by path, without making any."""
    from lcjax.parallel.sharding import path_of

    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    tree = jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)["params"]
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return MappingProxyType({path_of(keys): leaf for keys, leaf in leaves})


@functools.lru_cache(maxsize=64)
def visible_keys(config: ModelConfig, length: int) -> float:
    """Keys that a query sees under the config's pattern, averaged over a sequence.

    Counted from the pattern's own masks, on queries spread evenly over the sequence.
    """
    count = min(length, _SAMPLED_QUERIES)
    # Middles of equal pieces: exact for all masks whose row sums are linear in each piece.
    queries = ((np.arange(count) + 0.5) * length / count - 0.5).round().astype(np.int64)
    keys = np.arange(length, dtype=np.int64)
    total = 0
    with jax.ensure_compile_time_eval():
        metadata = AttentionMetadata(
            queries[None], keys[None], q_index=queries, k_index=keys, num_heads=config.num_heads
        )
        parts = [
            part
            for step in config.pattern.passes(metadata)
            for part in by_heads(step.mask, config.num_heads)
        ]
        for mask, heads in parts:
            for piece in np.array_split(queries, max(1, count * length // 2**22)):
                seen = np.asarray(mask.element(piece[:, None], keys[None]))
                total += heads * int(np.broadcast_to(seen, (len(piece), length)).sum())
    return total / count / config.num_heads


def peak_flops(device: jax.Device | None = None) -> float | None:
    """Peak FLOP/s of a device from the table, or None for a device that is not in it."""
    device = device or jax.devices()[0]
    kind = device.device_kind.lower()
    # "L4" is no part of "L40", nor "T4" of "T400".
    found = (peak for name, peak in PEAK_FLOPS if re.search(rf"\b{name}\b", kind))
    return next(found, None)


def measured_peak(dtype: str = "float32", size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of the best of some square matrix products on the default device, now.

    The yardstick where no data sheet helps, such as a CPU: there "devices" share the same cores,
    so it stands for the whole machine.
    """
    a = jnp.full((size, size), 0.5, jnp.dtype(dtype))
    product = jax.jit(jnp.dot)
    product(a, a).block_until_ready()
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def machine_peak(dtype: str) -> tuple[float, str]:
    """(FLOP/s of all devices together, where that number is from)."""
    devices = jax.devices()
    peak = peak_flops(devices[0])
    if peak is not None:
        return peak * len(devices), f"{len(devices)} x {devices[0].device_kind}, bfloat16 peak"
    count = 1 if devices[0].platform == "cpu" else len(devices)
    source = f"measured {dtype} matrix product on this {devices[0].platform}"
    return measured_peak(dtype) * count, source
