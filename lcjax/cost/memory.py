"""Memory that one device needs for training or for writing text, known before anything runs.

Weights, gradients, optimizer state and cache follow from shapes and from the table of shardings.
What the backward pass keeps is not modelled but asked of JAX: the residuals of the model's own
gradient, traced for two short texts, grow by a fixed number of bytes per token. Buffers that a
compiler adds or saves are not in it: on TPUs it was 15 % below to 26 % above (adapters) what libtpu
allots, and an allocator needs room.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.cost.compute import note_bytes, parameter_shapes
from lcjax.errors import InputError
from lcjax.models import Decoder, ModelConfig, head
from lcjax.models.loss import cross_entropy
from lcjax.parallel.offload import LAYER, STACK, Offload, offloadable
from lcjax.parallel.sharding import AXES, Mesh, spec_of
from lcjax.tree import nest, split, union

_LOGITS = 2**30  # bytes of float32 logits that the loss makes at once on accelerators
_SHORT, _LONG = 128, 256  # tokens of the texts whose residuals are compared


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device at the moment when most is needed."""

    weights: int
    gradients: int = 0
    optimizer: int = 0  # moments, and the running average of the weights
    activations: int = 0  # kept for the backward pass, and what one layer and the loss work with
    cache: int = 0
    context: int = 0  # what a memory keeps of texts that it has read
    host: int = 0  # in the memory of the device's host, and not in the total

    @property
    def parts(self) -> dict[str, int]:
        """What adds up to the total, by name."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "host"]
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        named = " + ".join(f"{name} {size / 1e9:.1f}" for name, size in self.parts.items() if size)
        beside = f", {self.host / 1e9:.1f} GB on its host" if self.host else ""
        return f"{self.total / 1e9:.1f} GB per device ({named}){beside}"


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
) -> Memory:
    """Of an update on `rows` texts of `length` tokens, the rows of one microbatch on all devices.

    `context`: chunks, and tokens of each, that a model with a memory reads beside every text.

    `trained(path)` says which parameters are trained. Gradients and both moments of Adam are
    float32 and lie where their parameter lies; so does the running `average`, if one is kept. What
    `offload` names (`train.offload`) waits on the host; of it a device has a part at a time.
    """
    sizes = _sizes(mesh)
    counts = _per_device(config, sizes)
    own = {path: count for path, (count, _) in counts.items() if trained(path)}
    weights = {path: size for path, (_, size) in counts.items()}
    moments = {path: (12 if average else 8) * count for path, count in own.items()}
    waiting = [weights] * (offload == "parameters") + [moments] * (offload != "none")
    return Memory(
        weights=_here(config, weights, offload == "parameters"),
        gradients=4 * sum(own.values()),
        optimizer=_here(config, moments, offload != "none"),
        host=sum(map(sum, (_waiting(config, part).values() for part in waiting))),
        activations=_backward(config, sizes, _rows(rows, sizes), length, context, trained),
    )


def generation_memory(
    config: ModelConfig,
    length: int,
    rows: int,
    mesh: Mesh | jax.sharding.Mesh,
    *,
    chunk: int = 4096,
    context: tuple[int, int] | None = None,
) -> Memory:
    """Of writing text in `rows` caches of `length` slots, prompts read `chunk` tokens at a time.

    `context`: chunks, and tokens of each, that a model with a memory has read beside every row.
    With `chunk` equal to `length` it is at least what scoring texts of that length needs, which
    fills no cache.
    """
    sizes = _sizes(mesh)
    own = _rows(rows, sizes)
    heads = _share(config.num_kv_heads, sizes["tensor"])
    slots = 2 * config.num_layers * own * heads * config.head_dim * length
    wide = _local(config, sizes)
    # The widest moment of a layer: two feed-forward activations, or q, k, v and the output.
    channels = max(2 * wide.mlp_width, 2 * (wide.num_heads + wide.num_kv_heads) * wide.head_dim)
    tokens = own * min(chunk, length)
    size = config.compute_dtype().itemsize
    notes = note_bytes(config, length, heads=_share(config.num_heads, sizes["tensor"]))
    return Memory(
        weights=_bytes(_per_device(config, sizes)),
        activations=size * tokens * (channels + 3 * config.width) + 4 * own * config.vocab_size,
        cache=size * slots + config.num_layers * own * notes,
        context=0 if context is None else own * _encoded(config, *context),
    )


def _encoded(config: ModelConfig, chunks: int, size: int) -> int:
    """Bytes that are kept of so many chunks of `size` tokens, and what one layer makes of them."""
    config = config.replace(memory=config.memory.without_query())
    model, params = Decoder(config), nest(parameter_shapes(config))

    def encode(params):
        chunk = jnp.ones((1, 1, size), jnp.int32)
        return model.apply({"params": params}, chunk, chunk > 0, method="encode")

    encoded = jax.eval_shape(encode, params)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(encoded))
    if encoded.layers is None:  # keys and values of a layer
        kept += 2 * config.num_kv_heads * config.head_dim * size * config.compute_dtype().itemsize
    return chunks * kept


def _sizes(mesh: Mesh | jax.sharding.Mesh) -> Mapping[str, int]:
    if not isinstance(mesh, Mesh):
        return mesh.shape
    sizes = dataclasses.asdict(mesh)
    if any(sizes[axis] < 1 for axis in AXES):
        raise InputError(f"mesh={sizes}: write how many devices lie along each axis, not -1")
    return sizes


def _rows(rows: int, sizes: Mapping[str, int]) -> int:
    """Rows on one device; a batch is filled up until all have equally many."""
    return -(-rows // (sizes["data"] * sizes["fsdp"]))


def _share(count: int, devices: int) -> int:
    return count // devices if count % devices == 0 else count


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What `spec_of` asks of a mesh; no device is needed."""

    shape: Mapping[str, int]


def _per_device(config: ModelConfig, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """(numbers, bytes) of each parameter on one device, by path."""
    found = {}
    for path, leaf in parameter_shapes(config).items():
        spec = spec_of(path, leaf.shape, _Shape(sizes))
        axes = (axis if isinstance(axis, tuple) else (axis,) for axis in spec if axis)
        count = math.prod(leaf.shape) // math.prod(sizes[name] for axis in axes for name in axis)
        found[path] = count, count * leaf.dtype.itemsize
    return found


def _bytes(counts: Mapping[str, tuple[int, int]]) -> int:
    return sum(size for _, size in counts.values())


def _waiting(config: ModelConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """Those of `sizes`, by path, whose parameters can wait on the host."""
    shapes = parameter_shapes(config)
    return {path: x for path, x in sizes.items() if offloadable(path, len(shapes[path].shape))}


def _here(config: ModelConfig, sizes: Mapping[str, int], offload: bool) -> int:
    """Of so many bytes by path, those that a device has at a time if the others may wait.

    What is in no layer comes together; of the layers one, and the next while that one is computed.
    """
    if not offload:
        return sum(sizes.values())
    shapes, waiting = parameter_shapes(config), _waiting(config, sizes)
    outside, layers = sum(sizes.values()) - sum(waiting.values()), collections.Counter()
    for path, size in waiting.items():
        if stack := STACK.match(path):
            layers[stack[0]] += size // shapes[path].shape[0]
        elif layer := LAYER.match(path):
            layers[layer[0]] += size
        else:
            outside += size
    return outside + 2 * max(layers.values(), default=0)


def _local(config: ModelConfig, sizes: Mapping[str, int]) -> ModelConfig:
    """The part of each layer that one device of the tensor axis computes."""
    tensor, memory = sizes["tensor"], config.memory
    if memory is not None and memory.encoder_config is not None:
        memory = dataclasses.replace(memory, states=_local(memory.encoder_config, sizes))
    heads, shared = _share(config.num_heads, tensor), _share(config.num_kv_heads, tensor)
    if heads % shared:  # more devices than key heads: each computes all of those
        heads, shared = config.num_heads, config.num_kv_heads
    width = _share(config.mlp_width, tensor)
    return config.replace(num_heads=heads, num_kv_heads=shared, mlp_width=width, memory=memory)


def _backward(
    config: ModelConfig,
    sizes: Mapping[str, int],
    rows: int,
    length: int,
    context: tuple[int, int] | None,
    trained: Callable[[str], bool],
) -> int:
    """What all layers keep, what one more needs while it is computed again, weights that fsdp
    and context gather for it, two chunks of logits, and the same of a context."""
    local, numbers = _local(config, sizes), np.array([rows * length, 0])
    chunk = None
    if config.memory is not None and context is not None:
        chunk, numbers[1] = context[1], rows * math.prod(context)
    kept = _kept(local, chunk, trained)
    if config.remat != "none":
        bare = local.replace(remat="none")
        two, one = (_kept(bare, chunk, trained, layers=count) for count in (2, 1))
        kept = kept + two - one
    tokens = -(-numbers // sizes["context"])
    gathered = 0
    if sizes["fsdp"] * sizes["context"] > 1:
        whole = _per_device(config, {**sizes, "fsdp": 1, "context": 1})
        weights = sum(count for path, (count, _) in whole.items() if path.startswith("layers"))
        gathered = config.compute_dtype().itemsize * weights // config.num_layers
    vocabulary = _share(config.vocab_size, sizes["tensor"])
    logits = 2 * min(_LOGITS, 4 * int(tokens[0]) * vocabulary)
    return math.ceil(tokens @ kept) + gathered + logits


def _kept(
    config: ModelConfig,
    chunk: int | None,
    trained: Callable[[str], bool],
    *,
    layers: int | None = None,
) -> np.ndarray:
    """Bytes that the backward pass keeps for each token of a text, and of a context that is read.

    The context comes in chunks of `chunk` tokens; None: there is none. With `layers`, of so many,
    which all read it.
    """
    count = config.num_layers if layers is None else layers
    plain = config.replace(num_layers=count, scan_layers=True, memory=None)
    if chunk is None:
        return _slopes(plain, None, trained)
    reading = count if layers is not None else sum(config.memory.reader_layers(count))
    memory = config.memory.without_query().with_num_readers(reading)
    reader = plain.replace(num_layers=reading, memory=memory)
    found = _slopes(reader, chunk, trained)
    if reading < count:
        fewer = plain.replace(num_layers=reading)
        found = found + _slopes(plain, None, trained) - _slopes(fewer, None, trained)
    return found


def _slopes(config: ModelConfig, chunk: int | None, trained: Callable[[str], bool]) -> np.ndarray:
    """What `_kept` says, of all layers of `config`.

    Scanned layers stand for those that are trained, where rules tell layers apart.
    """

    def any_trained(path: str) -> bool:
        if trained(path) or not path.startswith("layers/"):
            return trained(path)
        rest = path.removeprefix("layers/")
        return any(trained(f"layers_{index}/{rest}") for index in range(config.num_layers))

    return _residuals(config, chunk, frozenset(filter(any_trained, parameter_shapes(config))))


@functools.lru_cache(maxsize=64)  # seconds, and runs of one model are often alike
def _residuals(config: ModelConfig, chunk: int | None, trained: frozenset[str]) -> np.ndarray:
    """`_slopes` by the paths that are trained; traced for short texts, not computed."""
    model = Decoder(config)
    own, frozen = split(nest(parameter_shapes(config)), trained.__contains__)

    def residuals(length, chunks):
        def backward(own, frozen, tokens):
            def loss(own):
                params, memory = union(own, frozen), None
                if chunk is not None:
                    context = jnp.ones((1, chunks, chunk), jnp.int32)
                    parts = context, context > 0
                    memory = model.apply({"params": params}, *parts, method="encode")
                hidden, _ = model.apply({"params": params}, tokens, memory=memory)
                weights = jnp.ones(tokens.shape)
                return cross_entropy(hidden, head(params, config), tokens, weights)[0]

            return jax.vjp(loss, own)[1]

        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        kept = jax.tree.leaves(jax.eval_shape(backward, own, frozen, tokens))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in kept)

    first = residuals(_SHORT, 1)
    each = (residuals(_LONG, 1) - first) / (_LONG - _SHORT)
    slopes = np.array([each, 0 if chunk is None else (residuals(_SHORT, 2) - first) / chunk])
    slopes.flags.writeable = False
    return slopes
