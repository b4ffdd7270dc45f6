"""Parameters, FLOPs per token, cache bytes and bytes per device, without running a model.

FLOPs count multiplications and additions of matrix products only, two per multiply-add (Kaplan et
al. 2020, arXiv 2001.08361, sec. 2.1; Chowdhery et al. 2022, PaLM, appendix B). Work that an
implementation repeats (rematerialisation) or wastes (masked blocks) is not counted, so
FLOPs / (time * peak) is the *model* FLOPs utilisation.

Weights, gradients, optimizer state and cache follow from shapes and from the table of shardings.
The memory of the backward pass is that of the arrays that live at the same time in the traced
gradient of what one device computes (`lcjax.cost.liveness`). docs/benchmarks.md has the result
beside what compilers allocate.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import AttentionMetadata
from lcjax.attention.indexer import adds_divergence
from lcjax.cost import liveness
from lcjax.models import Decoder, ModelConfig, head, layer_groups
from lcjax.models import cache as cache_lib
from lcjax.models.layers import CollectTerms, is_of_pattern, learns_by_divergence
from lcjax.models.loss import cross_entropy
from lcjax.models.tiles import tile_bytes
from lcjax.models.weight_storage import kernel_of, num_weights
from lcjax.parallel.device_memory import LAYER, STACK, Offload, offloadable
from lcjax.parallel.sharding import ROWS, Mesh, path_of, spec_of, spread_over
from lcjax.tree import nest, split, union
from pallas_kernels import by_heads
from pallas_kernels.rows import max_rows

_SAMPLED_QUERIES = 256
_SEPARATE = re.compile(r"layers_(\d+)/(.*)")  # parameters of a layer whose weights are separate
_EXPERTS = re.compile(r"/mlp/experts/")
_PROCESS = 600_000_000  # bytes of Python, JAX, a tokenizer and compilers on a CPU, measured
# XLA for CPUs computes in float32 and shares buffers less: as many times the activations of a layer
# without gradients, and as many times those of its mixer beside what the backward pass needs.
# Measured.
_CPU_FORWARD, _CPU_MIXER = 2, 5
# Compilers for accelerators also keep copies in other layouts, and cannot fill every gap. Measured.
_COPIES = 1.1
# A device of each platform, for which programs are traced.
_KINDS = {"tpu": "TPU v5", "gpu": "NVIDIA H100", "cpu": "cpu"}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts for one model at one length; FLOPs are per token, averaged over the sequence."""

    parameters: int
    # Used for one token: of a mixture, `top_k` experts; of a table of `layer_embedding`, a row
    active_parameters: int
    trained_parameters: int
    parameter_bytes: int
    matmul_flops: float  # forward, through weight matrices, the head included
    # Forward, queries with keys and weights with values, and of states in place of attention
    attention_flops: float
    weight_gradient_flops: float  # backward, for the trained weights only
    idle_flops: float  # backward, of activations before all trained weights: not computed
    kv_cache_bytes: int  # of one sequence of that length, at the end of its prompt
    # In a training, the probabilities of attention that patterns learn (`DistilledPattern`)
    teacher_flops: float = 0.0

    @property
    def forward_flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    @property
    def training_flops(self) -> float:
        """FLOPs of the forward pass and of the gradients of activations and trained weights.

        Attention has two products forward and four backward. With every weight trained this is
        the familiar three times forward; with adapters on frozen weights it is nearer two.
        """
        activations = self.matmul_flops + 2 * self.attention_flops - self.idle_flops
        backward = activations + self.weight_gradient_flops
        return self.forward_flops + backward + self.teacher_flops


def estimate(
    config: ModelConfig,
    length: int,
    *,
    trained=lambda path: True,
    context: tuple[int, int] | None = None,
) -> Cost:
    """Counts parameters, and FLOPs per token averaged over a sequence of `length` tokens.

    Args:
      config: the model.
      length: tokens of a sequence.
      trained: whether the parameter at a path (`layers/attention/query/kernel`, ...) is trained.
      context: chunks, and tokens of each chunk, that a model with a memory encodes for a sequence;
        None: it encodes and reads nothing.
    """
    shapes = parameter_shapes(config)
    parameters_of_patterns = (x for one in config.patterns for x in one.parameters.items())
    projections = {name for name, one in parameters_of_patterns if "D" in one.axes}
    context_flops = _context_flops(config, length, context, trained)
    # Parameters that learn from a divergence alone need no logits, and no other gradient.
    is_distilled = learns_by_divergence(config.patterns, filter(trained, shapes))
    matmul, weight_gradients = 0.0, 0.0
    parameters = active_parameters = trained_parameters = nbytes = 0
    for path, leaf in shapes.items():
        size = num_weights(path, leaf.shape)
        parameters += size
        active_parameters += _active(config, path, size)
        nbytes += math.prod(leaf.shape) * leaf.dtype.itemsize
        trained_parameters += size if trained(path) else 0
        product = (kernel_of(path) or path).endswith(("/kernel", "/lora_a", "/lora_b")) or (
            # Reading a row of the table is no product; a tied head is one.
            path == "embed/embedding" and config.tie_embeddings
        )
        product |= is_of_pattern(path) and path.rpartition("/")[2] in projections
        product &= not (is_distilled and path in ("embed/embedding", "head/kernel"))
        uses = _weight_uses(config, path, length, context)
        flops = 2 * _active(config, path, size) * uses if product else 0
        matmul += flops
        weight_gradients += flops if trained(path) else 0
    attention, choice = attention_flops(config, length), _choice_flops(config, length)
    unused = matmul + 2 * (attention - choice) if is_distilled else 0.0
    return Cost(
        parameters=parameters,
        active_parameters=active_parameters,
        trained_parameters=trained_parameters,
        parameter_bytes=nbytes,
        matmul_flops=matmul,
        attention_flops=attention + context_flops.attention,
        weight_gradient_flops=weight_gradients,
        idle_flops=context_flops.idle + unused,
        kv_cache_bytes=cache_bytes(config, length),
        teacher_flops=_teacher_flops(config, length),
    )


def attention_flops(config: ModelConfig, length: int, last: int | None = None) -> float:
    """Returns forward FLOPs of a token in attention and mixers, products with weights aside.

    A query and a key that it sees have a product for the logit and one for the value, and patterns
    that choose keys by the data have products for the choice. Arguments are those of
    `keys_by_layer`.
    """
    flops = 0.0
    for number, keys in enumerate(keys_by_layer(config, length, last)):
        layer = config.layer(number)
        mixer = layer.mixer
        flops += mixer.flops() if mixer else 4 * layer.num_heads * layer.head_dim * keys
    return flops + _choice_flops(config, length, last)


def _choice_flops(config: ModelConfig, length: int, last: int | None = None) -> float:
    """Returns the FLOPs with which a token chooses keys; arguments as in `keys_by_layer`."""
    keys = (length + 1) / 2 if last is None else length - (last - 1) / 2
    return sum(
        count * layer.pattern.choice_flops(cache_lib.layer_shape(layer), length, keys)
        for layer, count in config.layer_counts
        if layer.mixer is None
    )


def _teacher_flops(config: ModelConfig, length: int) -> float:
    """Returns the FLOPs of the logits of all earlier keys, from which patterns learn."""
    return sum(
        count * 2 * layer.num_heads * layer.head_dim * (length + 1) / 2
        for layer, count in config.layer_counts
        if layer.mixer is None and adds_divergence(layer.pattern)
    )


def cache_bytes(config: ModelConfig, length: int, tensor: int = 1) -> int:
    """Returns the bytes that all layers hold of one sequence, at the end of its prompt.

    They are those of the tokens that stay, and of what the kinds of cache hold beside them
    (`LayerCache.arrays`). Empty slots for later tokens are not counted. Where heads keep different
    numbers of tokens, each has the slots that its layer gives it. `tensor` devices share the heads;
    the bytes are those on one of them.
    """
    ends = [kind.after_prompt(length) for kind in cache_lib.layer_caches(config)]
    return sum(
        _row_bytes(kind.arrays(cache_lib.layer_shape(config.layer(number)), slots), tensor)
        for number, (kind, slots) in enumerate(ends)
    )


def state_bytes(config: ModelConfig, tensor: int = 1) -> int:
    """Returns the bytes of one sequence's states in layers without attention, on one device.

    `tensor` devices share the heads.
    """
    dtype = config.compute_dtype()
    return sum(
        count * _row_bytes(layer.mixer.state(dtype), tensor)
        for layer, count in config.layer_counts
        if layer.mixer is not None
    )


def read_cache_bytes(
    config: ModelConfig, length: int, tokens: int = 1, sizes: Mapping[str, int] | None = None
) -> int:
    """Returns the bytes in the cache of one sequence that its last `tokens` tokens may need.

    They are those of the keys and values that at least one of these tokens sees, and of what the
    kinds of cache hold beside them (`LayerCache.read_arrays`). With `sizes` of mesh axes, they are
    those on one device.
    """
    sizes = Mesh(fsdp=1).shape if sizes is None else sizes
    total = 0
    caches = cache_lib.layer_caches(config)
    for source in config.key_sources:  # layers that read the keys of another one read them again
        layer, kind = config.layer(source), caches[source]
        devices = cache_lib.slot_devices(layer, kind, sizes)
        arrays = kind.read_arrays(cache_lib.layer_shape(layer), length, tokens, devices)
        total += _row_bytes(arrays, sizes["tensor"])
    return total


def _row_bytes(arrays: Mapping[str, jax.ShapeDtypeStruct], tensor: int = 1) -> int:
    """Returns the bytes of one row's arrays on one of `tensor` devices that share heads."""

    def nbytes(heads, *rest):
        return divided(heads, tensor) * math.prod(rest)

    return sum(nbytes(*array.shape) * array.dtype.itemsize for array in arrays.values())


def _active(config: ModelConfig, path: str, size: int) -> int:
    """Returns how many of the `size` numbers of the parameter at `path` are used for one token."""
    experts = config.experts
    if path == "layer_embed/embedding":
        return size // config.vocab_size
    return size * experts.top_k // experts.count if is_expert(path) else size


def is_expert(path: str) -> bool:
    """Returns whether the parameter at a path holds weights of a mixture's experts."""
    return _EXPERTS.search(path) is not None


def _weight_uses(
    config: ModelConfig, path: str, length: int, context: tuple[int, int] | None
) -> float:
    """Returns how many tokens a weight multiplies for each token of the sequence."""
    return 1.0 if config.memory is None else config.memory.weight_uses(path, length, context)


class _ContextFlops(NamedTuple):
    """FLOPs of a memory per token of the sequence, beside the products that `estimate` counts."""

    attention: float = 0.0  # within chunks, and from the decoder to all chunks
    idle: float = 0.0  # `Cost.idle_flops`


def _context_flops(
    config: ModelConfig, length: int, context: tuple[int, int] | None, trained
) -> _ContextFlops:
    """Returns the FLOPs of a memory's attention, and those that the backward pass omits."""
    if config.memory is None or context is None:
        return _ContextFlops()
    inside, outside = config.memory.attention_flops(config, length, context, visible_keys)
    if config.memory.encoder_config is None:  # no encoder whose backward pass could be omitted
        return _ContextFlops(inside + outside)
    shapes = parameter_shapes(config)
    searched = _search_flops(config, length, context, shapes)
    attention = inside + outside + searched
    if any(trained(path) for path in shapes if path.startswith("encoder/")):
        return _ContextFlops(attention, 2 * searched)
    before = sum(
        2 * math.prod(leaf.shape) * _weight_uses(config, path, length, context)
        for path, leaf in shapes.items()
        if path.endswith("/kernel") and re.search(r"^encoder/|/memory/(key|value)/", path)
    )
    return _ContextFlops(attention, before + 2 * inside + 2 * searched)


def _search_flops(
    config: ModelConfig, length: int, context: tuple[int, int], shapes: Mapping
) -> float:
    """Returns the FLOPs of choosing tree nodes: one layer over all halves, and the question."""
    memory = config.memory
    if not memory.query_dependent:
        return 0.0
    tokens = [context[1] >> level for level in range(memory.tree.depth - 1)]
    layers = [leaf.shape for path, leaf in shapes.items() if path.startswith("encoder/layers/")]
    each = 2 * sum(math.prod(shape[1:]) for shape in layers if len(shape) > 2)
    pair = 4 * config.num_heads * config.head_dim
    total = sum(context[0] * size * (each + pair * size / 4) for size in tokens)
    return total / length + each + pair * visible_keys(config, length)


@functools.lru_cache(maxsize=64)  # the start of a run needs them several times
def parameter_shapes(config: ModelConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of every parameter by path."""
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    tree = jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)["params"]
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return MappingProxyType({path_of(keys): leaf for keys, leaf in leaves})


def visible_keys(config: ModelConfig, length: int, last: int | None = None) -> float:
    """Returns the mean of `keys_by_layer` over all layers."""
    keys = keys_by_layer(config, length, last)
    return sum(keys) / len(keys)


@functools.lru_cache(maxsize=64)
def keys_by_layer(config: ModelConfig, length: int, last: int | None = None) -> tuple[float, ...]:
    """Returns the mean number of keys that a query sees in each layer; 0 in one without attention.

    It is counted from the patterns' masks, for evenly spaced queries in the sequence or, if `last`
    is not None, in its last `last` tokens. These see at most what `model.cache` shows them
    (`LayerCache.num_multiplied`).
    """
    by_kind = [
        _unmasked_keys(layer, length, last) if layer.mixer is None else 0.0
        for layer in map(config.of_kind, config.kinds)
    ]
    keys = [by_kind[kind] for kind in config.kind_by_layer]
    if last is not None and config.cache is not None:
        caches = cache_lib.layer_caches(config)
        bounds = [caches[source].num_multiplied(length, last) for source in config.key_sources]
        keys = map(min, keys, bounds)
    return tuple(keys)


def _unmasked_keys(config: ModelConfig, length: int, last: int | None) -> float:
    """Returns `visible_keys` under the mask of the pattern, of which the cache holds all."""
    size = length if last is None else last
    count = min(size, _SAMPLED_QUERIES)
    # Middles of equal pieces: exact for all masks whose row sums are linear in each piece.
    queries = ((np.arange(count) + 0.5) * size / count - 0.5).round().astype(np.int64)
    queries += length - size
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


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device at the peak of a program."""

    weights: int
    gradients: int = 0
    optimizer: int = 0  # moments, and the running average of the weights
    # Residuals of the backward pass, and temporaries of a layer, the loss and the update
    activations: int = 0
    cache: int = 0
    context: int = 0  # encoded contexts of a memory
    process: int = 0  # on a CPU: Python, JAX and compilation
    text: int = 0  # on a CPU: the text that the loader holds
    host: int = 0  # in the memory of the device's host, and not in the total

    @property
    def parts(self) -> dict[str, int]:
        """The parts of the total, by name."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "host"]
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        named = " + ".join(f"{name} {size / 1e9:.1f}" for name, size in self.parts.items() if size)
        host = f", {self.host / 1e9:.1f} GB on its host" if self.host else ""
        place = "" if self.process else " per device"
        return f"{self.total / 1e9:.1f} GB{place} ({named}){host}"

    def on_cpu(self, devices: int, *, text: int = 0) -> "MemoryEstimate":
        """Returns the memory of a machine whose CPU is `devices` devices, with its process.

        Args:
          devices: CPU devices that share the memory of the machine.
          text: bytes of the text that the process holds.
        """
        parts = {name: devices * size for name, size in self.parts.items()}
        parts["weights"] += devices * self.host  # offloaded arrays are in the same memory
        return MemoryEstimate(**parts | {"process": _PROCESS, "text": text})


def training_memory(
    config: ModelConfig,
    length: int,
    rows: int,
    mesh: Mesh | jax.sharding.Mesh,
    *,
    trained: Callable[[str], bool] = lambda path: True,
    average: bool = False,
    context: tuple[int, int] | None = None,
    offload: Offload = "none",
    accumulates: bool = False,
    platform: str | None = None,
) -> MemoryEstimate:
    """Returns the bytes on each device of a training step.

    Gradients, both moments of Adam and the running average are float32 and sharded like their
    parameter. Offloaded arrays are in the host's memory; a device holds a part of them at a time.

    Args:
      config: the model.
      length: tokens of a text.
      rows: texts of one microbatch on all devices.
      mesh: sizes of the mesh axes.
      trained: whether the parameter at a path is trained.
      average: whether a running average of the weights is kept.
      context: chunks, and tokens of each chunk, that a model with a memory reads for every text.
      offload: `train.offload`.
      accumulates: whether an update sums the gradients of several microbatches.
      platform: platform of the devices; None: that of the mesh, or TPUs.
    """
    sizes = mesh.shape
    counts = per_device(config, sizes)
    trained_counts = {path: count for path, (count, _) in counts.items() if trained(path)}
    weights = {path: size for path, (_, size) in counts.items()}
    moments = {path: (12 if average else 8) * count for path, count in trained_counts.items()}
    offloaded = [weights] * (offload == "parameters") + [moments] * (offload != "none")
    platform, gradients = platform or _platform(mesh), 4 * sum(trained_counts.values())
    activations, host = _backward_bytes(
        *(config, sizes, rows_of_device(rows, sizes), length, context, trained), platform=platform
    )
    activations += 0 if offload == "parameters" else _stacked_bytes(config, weights)
    # Fitted: with these bytes the estimates agree best with libtpu, which keeps parts of gradients
    # also in layouts that pad axes which many devices share.
    activations += gradients if platform == "tpu" else 0
    if platform == "cpu":
        activations += _CPU_MIXER * _mixer_bytes(config, sizes, rows, length)
    if platform == "gpu" and offload == "none":
        # XLA for GPUs writes the new state beside the old one, as the update is a branch
        # (`training.step`), when activations and the gradients of a microbatch are gone.
        state = sum(moments.values()) + sum(x for path, x in weights.items() if trained(path))
        activations = max(activations, state - (gradients if accumulates else 0))
    return MemoryEstimate(
        weights=_resident_bytes(config, weights, offload == "parameters"),
        # Sums over microbatches, and those of one.
        gradients=gradients * (2 if accumulates else 1),
        optimizer=_resident_bytes(config, moments, offload != "none"),
        host=host + sum(map(sum, (_offloadable_bytes(config, x).values() for x in offloaded))),
        activations=activations,
    )


def _mixer_bytes(config: ModelConfig, sizes: Mapping[str, int], rows: int, length: int) -> int:
    """Returns the bytes of the activations of one layer's mixer on a device; 0 without mixers."""
    tokens = rows_of_device(rows, sizes) * -(-length // sizes["context"])
    layers = (layer.mixer for layer, _ in _local_config(config, sizes).layer_counts)
    channels = max((mixer.channels for mixer in layers if mixer is not None), default=0)
    return tokens * channels * config.compute_dtype().itemsize


def _stacked_bytes(config: ModelConfig, weights: Mapping[str, int]) -> int:
    """Returns the bytes of the copies of weights that scans over separate layers stack.

    Layers of different kinds have separate weights, which a training step stacks
    (`layer_groups.scan`), and which stay until the backward pass is done.
    """
    if config.stacked or not config.scan_layers:
        return 0
    layers: list[dict] = [{} for _ in range(config.num_layers)]
    sizes = [0] * config.num_layers
    for path, leaf in parameter_shapes(config).items():
        if match := _SEPARATE.match(path):
            layers[int(match[1])][match[2]] = leaf
            sizes[int(match[1])] += weights[path]
    groups = layer_groups.group_layers(layers, layer_groups.layer_kinds(config))
    return sum(sizes[index] for scanned, _ in groups if len(scanned) > 1 for index in scanned)


def _platform(mesh: Mesh | jax.sharding.Mesh) -> str:
    """Returns the platform of the devices; that of TPUs for sizes alone."""
    return "tpu" if isinstance(mesh, Mesh) else mesh.devices.flat[0].platform


def generation_memory(
    config: ModelConfig,
    length: int,
    rows: int,
    mesh: Mesh | jax.sharding.Mesh,
    *,
    chunk: int = 4096,
    context: tuple[int, int] | None = None,
    platform: str | None = None,
) -> MemoryEstimate:
    """Returns the bytes on each device of generation.

    With `chunk` equal to `length` it is an upper bound for scoring texts of that length, which
    needs no cache.

    Args:
      config: the model.
      length: tokens of a row. A layer has as many slots, or those that its pattern needs.
      rows: rows on all devices.
      mesh: sizes of the mesh axes.
      chunk: tokens of a prompt that are read at once.
      context: chunks, and tokens of each chunk, that a model with a memory has read for every row.
      platform: platform of the devices; None: that of the mesh, or TPUs.
    """
    sizes, platform = mesh.shape, platform or _platform(mesh)
    local_rows = rows_of_device(rows, sizes)
    local = _local_config(config, sizes)
    tokens = local_rows * min(chunk, length)
    channels = max((_channels(layer, tokens) for layer, _ in local.layer_counts), default=0)
    cache = 0
    fitted = cache_lib.fitted_caches(config, length, chunk, mesh=mesh)
    for number, (kind, slots) in enumerate(fitted):
        shape = cache_lib.layer_shape(config.layer(number))
        arrays = kind.arrays(shape, -(-slots // kind.parts))
        cache += local_rows * _row_bytes(arrays, sizes["tensor"])
    embeddings = config.num_layers * (config.layer_embedding or 0)
    size = 4 * _CPU_FORWARD if platform == "cpu" else config.compute_dtype().itemsize
    activations = math.ceil(size * tokens * (channels + 3 * config.width + embeddings))
    logits = 4 * local_rows * config.vocab_size
    if platform == "cpu" and chunk >= length:  # scores, when the activations of layers are gone
        scores = 2 * min(tile_bytes("cpu"), 4 * tokens * config.vocab_size)
        logits = max(0, scores - activations)
    return MemoryEstimate(
        weights=sum(size for _, size in per_device(config, sizes).values()),
        activations=activations + logits,
        cache=cache,
        context=0 if context is None else local_rows * _encoded_bytes(config, *context),
    )


def _channels(layer: ModelConfig, tokens: int) -> float:
    """Returns the numbers of each of `tokens` at the widest moment of a layer.

    They are two activations of the MLP; or q, k, v and the output of attention, with the copies
    that the pattern makes; or those of a mixer; or of the experts of a token the inputs and both
    activations, or the outputs, in rows that fill blocks and in the order of tokens.
    """
    copies = 1 + layer.pattern.query_copies
    widest = 2 * (copies * layer.num_heads + layer.num_kv_heads) * layer.head_dim
    if layer.mixer is not None:
        widest = layer.mixer.channels
    if (experts := layer.experts) is None:
        return max(widest, 2 * layer.mlp_width)
    pairs, width = tokens * experts.top_k, layer.width
    rows = max_rows(pairs, experts.count)
    numbers = max(rows * (width + 2 * layer.expert_width), (rows + pairs) * width)
    return max(widest, 2 * (experts.shared_width or 0), numbers / tokens)


def _encoded_bytes(config: ModelConfig, chunks: int, size: int) -> int:
    """Returns the bytes of encoded chunks of `size` tokens, with one layer's keys and values."""
    config = config.replace(memory=config.memory.without_query())
    model, params = Decoder(config), nest(parameter_shapes(config))

    def encode(params):
        chunk = jnp.ones((1, 1, size), jnp.int32)
        return model.apply({"params": params}, chunk, chunk > 0, method="encode")

    encoded = jax.eval_shape(encode, params)
    size_of_chunk = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(encoded))
    if encoded.layers is None:  # keys and values of a layer
        key_width = 2 * config.num_kv_heads * config.head_dim
        size_of_chunk += key_width * size * config.compute_dtype().itemsize
    return chunks * size_of_chunk


def rows_of_device(rows: int, sizes: Mapping[str, int]) -> int:
    """Returns the rows on one device; a batch is padded to a multiple of the devices."""
    return -(-rows // math.prod(sizes[axis] for axis in ROWS))


def divided(count: int, devices: int) -> int:
    """Returns the part of `count` heads or channels on one device; all if it does not divide."""
    return count // devices if count % devices == 0 else count


def per_device(config: ModelConfig, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Returns (count of numbers, bytes) of each parameter on one device, by path."""
    counts, mesh = {}, Mesh(**sizes)
    for path, leaf in parameter_shapes(config).items():
        spec = spec_of(path, leaf.shape, mesh)
        devices = math.prod(sizes[axis] for axis in spread_over(spec))
        nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize // devices
        counts[path] = num_weights(path, leaf.shape) // devices, nbytes
    return counts


def stored_weights(config: ModelConfig) -> tuple[int, int]:
    """Returns the number of weights that are stored as codes, and the bytes of these and scales."""
    shapes = {path: x for path, x in parameter_shapes(config).items() if kernel_of(path)}
    count = sum(num_weights(path, leaf.shape) for path, leaf in shapes.items())
    return count, sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes.values())


def _offloadable_bytes(config: ModelConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the entries of `sizes`, by path, whose parameters can be offloaded."""
    shapes = parameter_shapes(config)
    return {path: x for path, x in sizes.items() if offloadable(path, len(shapes[path].shape))}


def _resident_bytes(config: ModelConfig, sizes: Mapping[str, int], offload: bool) -> int:
    """Returns the bytes that are on a device at a time, of arrays with `sizes` by path.

    With `offload` these are all arrays outside of layers, one layer, and the next layer, which is
    fetched while the first one is computed.
    """
    if not offload:
        return sum(sizes.values())
    shapes, offloaded = parameter_shapes(config), _offloadable_bytes(config, sizes)
    outside, layers = sum(sizes.values()) - sum(offloaded.values()), collections.Counter()
    for path, size in offloaded.items():
        if stack := STACK.match(path):
            layers[stack[0]] += size // shapes[path].shape[0]
        elif layer := LAYER.match(path):
            layers[layer[0]] += size
        else:
            outside += size
    return outside + 2 * max(layers.values(), default=0)


def _local_config(config: ModelConfig, sizes: Mapping[str, int]) -> ModelConfig:
    """Returns the config of the part of each layer that one device of the tensor axis computes."""
    tensor, memory = sizes["tensor"], config.memory
    if memory is not None and memory.encoder_config is not None:
        memory = dataclasses.replace(memory, states=_local_config(memory.encoder_config, sizes))
    heads = divided(config.num_heads, tensor)
    counts = {layer.num_kv_heads for layer, _ in config.layer_counts} | {config.num_kv_heads}
    shared = {count: divided(count, tensor) for count in counts}
    if any(heads % count for count in shared.values()):
        # Such as more devices than key heads: each computes all heads.
        heads, shared = config.num_heads, {count: count for count in counts}
    width, experts = divided(config.mlp_width, tensor), config.experts
    mixer = config.mixer and config.mixer.split(tensor)
    layers = tuple(
        dataclasses.replace(
            kind,
            mixer=kind.mixer and kind.mixer.split(tensor),
            num_kv_heads=kind.num_kv_heads and shared[kind.num_kv_heads],
            mlp_width=kind.mlp_width and divided(kind.mlp_width, tensor),
        )
        for kind in config.layers
    )
    if experts is not None:
        # Each device of the expert axis has rows for the tokens of all devices of that axis.
        exchanged = sizes["expert"] if experts.count % sizes["expert"] == 0 else 1
        top_k = min(experts.top_k * exchanged, experts.count)
        widths = {"width": divided(config.expert_width, tensor)}
        if experts.shared_width is not None:
            widths["shared_width"] = divided(experts.shared_width, tensor)
        experts = dataclasses.replace(experts, top_k=top_k, **widths)
    parts = {"experts": experts, "memory": memory, "mixer": mixer, "layers": layers}
    parts |= {"num_heads": heads, "num_kv_heads": shared[config.num_kv_heads]}
    return config.replace(mlp_width=width, **parts)


def _backward_bytes(
    config: ModelConfig,
    sizes: Mapping[str, int],
    rows: int,
    length: int,
    context: tuple[int, int] | None,
    trained: Callable[[str], bool],
    platform: str,
) -> tuple[int, int]:
    """Returns the bytes of the backward pass on one device and in its host, for its `rows`.

    They are those of the program that one device would run on its part of the tokens.
    """
    shards = sizes["context"]
    chunks = None
    if config.memory is not None and context is not None:
        chunks = -(-context[0] // shards), context[1]
        config = config.replace(memory=config.memory.without_query())
    gathers = sizes["fsdp"] * sizes["context"] * sizes["expert"] > 1
    learned = frozenset(filter(_any_layer(config, trained), _scanned_shapes(config)))
    local = _local_config(config, sizes).replace(scan_layers=True)
    parts = sizes["expert"] if config.experts and not config.experts.count % sizes["expert"] else 1
    device, host = _peak(
        local, rows, -(-length // shards), chunks, learned, platform, gathers, parts
    )
    if shards > 1:
        device += max(_gathered_bytes(layer, rows, length) for layer, _ in local.layer_counts)
    return device, host


def _gathered_bytes(layer: ModelConfig, rows: int, length: int) -> int:
    """Returns the bytes of keys and values of whole texts, if the pattern chooses among them."""
    if layer.mixer is not None or layer.pattern.is_position_based:
        return 0
    width = 2 * layer.num_kv_heads * layer.head_dim
    return rows * length * width * layer.compute_dtype().itemsize


def _any_layer(config: ModelConfig, trained: Callable[[str], bool]) -> Callable[[str], bool]:
    """Returns whether the parameter of a path is trained in any of the layers that it stacks."""

    def any_trained(path: str) -> bool:
        if trained(path) or not path.startswith("layers/"):
            return trained(path)
        rest = path.removeprefix("layers/")
        return any(trained(f"layers_{index}/{rest}") for index in range(config.num_layers))

    return any_trained


def _scanned_shapes(config: ModelConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    return parameter_shapes(config.replace(scan_layers=True))


@functools.lru_cache(maxsize=64)  # tracing takes seconds, and configs repeat
def _peak(
    config: ModelConfig,
    rows: int,
    length: int,
    chunks: tuple[int, int] | None,
    learned: frozenset[str],
    platform: str,
    gathers: bool,
    parts: int,
) -> tuple[int, int]:
    """Returns the most bytes of activations on a device and in its host.

    Args:
      config: the part of the model that a device computes.
      rows: texts on the device.
      length: tokens of each on the device.
      chunks: chunks of a text on the device, and tokens of each; None: no context.
      learned: paths of the trained parameters.
      platform: platform of the device.
      gathers: whether several devices share the weights.
      parts: number of devices among which experts are divided.
    """
    model = Decoder(config)
    trained, frozen = split(nest(parameter_shapes(config)), learned.__contains__)
    diverges = any(map(adds_divergence, config.patterns))
    is_distilled = learns_by_divergence(config.patterns, learned)
    shapes = [jax.ShapeDtypeStruct((rows, length), jnp.int32)]
    if chunks is not None:
        shapes.append(jax.ShapeDtypeStruct((rows, *chunks), jnp.int32))

    def gradients(trained, frozen, tokens, context=None):
        def loss(trained):
            params, memory = union(trained, frozen), None
            if context is not None:
                parts = context, context > 0
                memory = model.apply({"params": params}, *parts, method="encode")
            weights = jnp.ones(tokens.shape)
            collect = CollectTerms(weights) if diverges else None
            output = model.apply({"params": params}, tokens, memory=memory, collect=collect)
            divergence = sum(map(jnp.sum, jax.tree.leaves(output.divergence)))
            if is_distilled:
                return divergence
            ce, _ = cross_entropy(output.hidden, head(params, config), tokens, weights)
            return ce + divergence

        return jax.grad(loss)(trained)

    device = jax.sharding.AbstractDevice(_KINDS[platform], 1, platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.make_jaxpr(gradients)(trained, frozen, *shapes)
    num_weights = len(traced.jaxpr.invars) - len(shapes)
    shapes_of_layer = {
        x.shape[1:] if path.startswith("layers/") else x.shape
        for path, x in parameter_shapes(config).items()
        if is_expert(path)
    }
    spread = dict.fromkeys(shapes_of_layer, parts)
    device, host = liveness.peak_bytes(
        traced, num_weights, platform, gathers=gathers, spread=spread
    )
    return math.ceil(device * (1 if platform == "cpu" else _COPIES)), host
