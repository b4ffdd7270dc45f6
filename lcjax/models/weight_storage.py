"""Stores the matrices of layers as codes of 8 or 4 bits, for weights that are not trained.

The parameter `kernel` of a projection, or of all experts, is then a dict of arrays instead of one
array, and a layer turns it into floats where it multiplies (`stored_matmul`). The matrix in the
compute dtype exists while one product is computed, forward and again backward. It is no residual.

Codes are those of QLoRA (Dettmers et al. 2023, arXiv 2305.14314). Embeddings, the head, norms,
biases, routers and adapters stay as they are.

Why not qwix (0.1.8): it has NF4, but no quantisation of the scales, it stores arrays of the type
uint4, and it replaces products by intercepting JAX's functions, which does not reach those that the
layers differentiate by rules of their own.
"""

import abc
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from lcjax.errors import InputError, Range, check_fields
from lcjax.parallel.sharding import param_shardings
from lcjax.tree import flatten, lookup, nest

Arrays = dict[str, jax.Array]  # of one matrix, by name

# Quantiles of a normal distribution (appendix E), as float32.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_GROUP = 256  # scales that share a scale of their own (section 3)
_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class WeightStorage(draccus.ChoiceRegistry, abc.ABC):
    """How the matrices of layers are stored: the section `model.weights`."""

    codes: ClassVar[str]  # the name of the array with the codes
    per_code: ClassVar[int] = 1  # weights in one number of it
    block: ClassVar[int] = 1  # number of inputs that share a scale; it divides those of a matrix

    def __post_init__(self):
        check_fields("model.weights", self)

    @property
    def name(self) -> str:
        return self.get_choice_name(type(self))

    def check(self, sizes: dict[str, int]) -> None:
        """Raises an InputError unless `block` divides the inputs of every matrix, by name."""
        if any(size % self.block for size in sizes.values()):
            named = ", ".join(f"{name} {size}" for name, size in sizes.items())
            common = math.gcd(*sizes.values())
            fitting = [x for x in _BLOCKS if common % x == 0]
            way_out = f"set model.weights.block={max(fitting)}" if fitting else "take type int8"
            raise InputError(
                f"model.weights.block={self.block} must divide the inputs of every projection"
                f" ({named}); {way_out}"
            )

    @abc.abstractmethod
    def quantise(self, kernel: Float[Array, "..."], inputs: int = 1) -> Arrays:
        """Returns the arrays of a matrix; the result does not depend on how it is sharded.

        Args:
          kernel: the matrix, [*I, *O].
          inputs: number of its first axes, which products sum over.
        """

    @abc.abstractmethod
    def dequantise(self, arrays: Arrays, dtype: jax.typing.DTypeLike) -> Float[Array, "I *O"]:
        """Returns the matrix, computed in float32 and rounded once to `dtype`."""

    def with_scales(self, arrays: Arrays) -> Arrays:
        """Returns arrays of which each device of a mesh can dequantise its part by itself."""
        return arrays


@WeightStorage.register_subclass("int8")
@dataclasses.dataclass(frozen=True)
class Int8Weights(WeightStorage):
    """Integers -127 ... 127 and a float32 scale, max |w| / 127, for each output channel."""

    codes: ClassVar[str] = "int8"

    def quantise(self, kernel, inputs=1):
        wide = _with_flat_inputs(kernel, inputs)
        scale = jnp.abs(wide).max(0) / 127
        codes = jnp.round(wide * _inverse(scale)).clip(-127, 127).astype(jnp.int8)
        return {"int8": codes, "scale": scale}

    def dequantise(self, arrays, dtype):
        return (arrays["int8"].astype(jnp.float32) * arrays["scale"]).astype(dtype)


_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)


@WeightStorage.register_subclass("nf4")
@dataclasses.dataclass(frozen=True)
class NF4Weights(WeightStorage):
    """4-bit NormalFloat: the nearest of 16 quantiles times the largest |w| of a block of inputs.

    With inputs in multiples of `block`, blocks and codes are those of bitsandbytes (0.50), also of
    two equally near quantiles, of which the lower one is taken. bitsandbytes puts neighbouring
    inputs into one byte; here byte i of a block has inputs i and i + block / 2, which need no
    interleaving. Its `absmax` is in the order of its weights [outputs, inputs], as are the groups
    of 256 here. Groups of a matrix that its checkpoint fuses with others (q, k and v of Phi-3) are
    those of the matrix alone, and groups of queries and keys whose checkpoint rotates neighbouring
    channels are those of the library's order. The mean of the scales is summed in integers, so that
    it is the same on every mesh; it may differ from bitsandbytes' sum in float32 in the last bits.
    """

    # Neighbouring inputs of a projection that share a scale; bitsandbytes: blocksize
    block: Annotated[int, Range(_BLOCKS[0], _BLOCKS[-1])] = 64
    # Whether scales are stored in 8 bits, less their mean (bnb_4bit_use_double_quant)
    double: bool = True
    codes: ClassVar[str] = "nf4"
    per_code: ClassVar[int] = 2

    def __post_init__(self):
        super().__post_init__()
        if self.block not in _BLOCKS:
            raise InputError(
                f"model.weights.block={self.block} must be one of {', '.join(map(str, _BLOCKS))}"
            )

    def quantise(self, kernel, inputs=1):
        wide = _with_flat_inputs(kernel, inputs)
        blocks = wide.reshape(-1, self.block, *wide.shape[1:])
        absmax = jnp.abs(blocks).max(1)
        scaled = blocks * _inverse(absmax)[:, None]
        codes = sum((scaled > bound).astype(jnp.uint8) for bound in _bounds(np.float32(NF4)))
        first, second = jnp.split(codes, 2, axis=1)
        arrays = {"nf4": (first << 4) | second}
        return arrays | (_quantise_scales(absmax) if self.double else {"absmax": absmax})

    def dequantise(self, arrays, dtype):
        packed, absmax = arrays["nf4"], self.with_scales(arrays)["absmax"]
        codes = jnp.concatenate([packed >> 4, packed & 15], axis=1)
        wide = _look_up(NF4, codes) * absmax[:, None]
        return wide.reshape(-1, *wide.shape[2:]).astype(dtype)

    def with_scales(self, arrays):
        if not self.double or arrays["absmax"].dtype == jnp.float32:
            return arrays
        return {"nf4": arrays["nf4"], "absmax": _dequantise_scales(arrays)}


def _with_flat_inputs(kernel: jax.Array, inputs: int) -> jax.Array:
    """Returns the matrix in float32 with one axis of inputs, [I, *O]."""
    return kernel.astype(jnp.float32).reshape(-1, *kernel.shape[inputs:])


def _inverse(x: jax.Array) -> jax.Array:
    """Returns 1 / x; 0 for 0, the scale of zeros."""
    return jnp.where(x < _TINY, 0.0, 1 / jnp.maximum(x, _TINY))


def _bounds(values: np.ndarray) -> np.ndarray:
    """Returns the float32 numbers halfway between rising values."""
    return (values[1:] + values[:-1]) / np.float32(2)


def _look_up(table: tuple[float, ...], codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Returns table[codes].

    TPUs read a table element by element, so there it is a tree of selections, which other compilers
    keep in memory instead of fusing them.
    """

    def gathered(codes):
        return jnp.asarray(table, jnp.float32).at[codes].get(mode="promise_in_bounds")

    return lax.platform_dependent(codes, tpu=lambda codes: _select(table, codes), default=gathered)


def _select(table: tuple[float, ...], codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    if len(table) == 1:
        return jnp.float32(table[0])
    half = len(table) // 2
    low, high = (_select(part, codes) for part in (table[:half], table[half:]))
    return jnp.where((codes & half).astype(bool), high, low)


@functools.cache
def dynamic_map() -> np.ndarray:
    """Returns the 256 rising float32 numbers of bitsandbytes' signed dynamic 8-bit type.

    A sign, then zeros that count a decimal exponent 0 ... -6, then as many bits as are left for a
    linear fraction 0.1 ... 1 (Dettmers 2015, arXiv 1511.04561); also 0 and 1.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        # As torch.linspace rounds: from both ends, with steps in float32.
        count, start = 2**exponent, np.float32(0.1)
        step, i = np.float64((np.float32(1) - start) / count), np.arange(count + 1)
        edges = np.where(2 * i < count, start + step * i, 1 - step * (count - i)).astype("f4")
        means = (edges[:-1] + edges[1:]) / np.float32(2)
        values += [sign * x for x in np.float32(10.0 ** (exponent - 6)) * means for sign in (1, -1)]
    return np.sort(np.array(values, np.float32))


def _quantise_scales(absmax: Float[Array, "B *O"]) -> Arrays:
    """Stores scales in 8 bits: the dynamic type, in groups of the order [*O, B], less the mean."""
    mean = _mean(absmax)
    flat = _by_output(absmax - mean)
    flat = jnp.pad(flat, (0, -flat.size % _GROUP)).reshape(-1, _GROUP)
    largest = jnp.abs(flat).max(1)
    scaled = (flat * _inverse(largest)[:, None]).reshape(-1, 1)
    codes = (scaled > _bounds(dynamic_map())).sum(1, dtype=jnp.int32).astype(jnp.uint8)
    codes = _from_outputs(codes, absmax.shape)
    return {"absmax": codes, "absmax_scale": largest, "absmax_mean": mean}


def _dequantise_scales(arrays: Arrays) -> Float[Array, "B *O"]:
    codes, largest = arrays["absmax"], jnp.repeat(arrays["absmax_scale"], _GROUP)
    values = jnp.asarray(dynamic_map()).at[codes].get(mode="promise_in_bounds")
    return values * _from_outputs(largest, codes.shape) + arrays["absmax_mean"]


def _by_output(x: jax.Array) -> jax.Array:
    """Returns the numbers of x [B, *O] in the order [*O, B]."""
    return jnp.moveaxis(x, 0, -1).reshape(-1)


def _from_outputs(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverts `_by_output`; numbers after those of `shape` are left out."""
    first, *rest = shape
    return jnp.moveaxis(flat[: math.prod(shape)].reshape(*rest, first), -1, 0)


def _mean(x: jax.Array) -> jax.Array:
    """Returns the float32 mean of numbers >= 0, with the same bits in every program.

    Numbers are rounded to multiples of a power of two, 2^-22 or more of the largest, whose sums are
    exact in any order. All products are with powers of two, and exact: a compiler may contract them
    with a sum.
    """
    bits = lax.bitcast_convert_type(jnp.maximum(x.max(), _TINY), jnp.int32)
    power = lax.bitcast_convert_type(bits & 0x7F80_0000, jnp.float32)  # without the fraction
    steps = jnp.round(x / power * 2**22).astype(jnp.int32)
    # Sums of bytes of up to 8 million numbers fit into 31 bits.
    parts = [(steps >> shift & 255).sum(dtype=jnp.int32) for shift in (16, 8, 0)]
    high, middle, low = (part.astype(jnp.float32) for part in parts)
    return power * ((high * 2**16 + middle * 2**8 + low) / (2.0**22 * x.size))


# Paths of the matrices that a storage applies to, as they are without one.
_KERNEL = re.compile(r"^layers(_\d+)?/.*/(query|key|value|output_gate|out|gate|up|down)/kernel$")


def is_stored(path: str) -> bool:
    """Returns whether a storage applies to the parameter at this path."""
    return _KERNEL.match(path) is not None


def kernel_of(path: str) -> str | None:
    """Returns the path of the kernel of which `path` is an array; None for other parameters."""
    parent = path.rpartition("/")[0]
    return parent if is_stored(parent) else None


def num_weights(path: str, shape: tuple[int, ...]) -> int:
    """Returns the number of weights of the model in a parameter; 0 for scales of codes."""
    size = math.prod(shape)
    if kernel_of(path) is None:
        return size
    kinds = WeightStorage.get_known_choices().values()
    per_code = {kind.codes: kind.per_code for kind in kinds}
    return size * per_code.get(path.rpartition("/")[2], 0)


def quantise_kernel(
    storage: WeightStorage,
    path: str,
    kernel: jax.Array,
    mesh: jax.sharding.Mesh | None = None,
) -> Arrays:
    """Returns the arrays of the kernel at `path`, of one matrix after the other.

    Args:
      storage: how kernels are stored.
      path: the path of the parameter, which says which axes of it are inputs.
      kernel: the kernel.
      mesh: the devices over which the arrays are sharded; None: as XLA decides.
    """
    shardings = None
    if mesh is not None:
        shapes = nest({path: kernel_shapes(storage, path, kernel.shape)})
        shardings = tuple(sorted(lookup(param_shardings(mesh, shapes), path).items()))
    return _quantiser(storage, _num_inputs(path), _num_stacks(path), shardings)(kernel)


@functools.lru_cache(maxsize=64)
def _quantiser(
    storage: WeightStorage, inputs: int, stacks: int, shardings: tuple | None
) -> Callable[[jax.Array], Arrays]:
    """Returns a compiled function, which equal layers share."""

    def quantise(matrix):
        return storage.quantise(matrix, inputs)

    for _ in range(stacks):
        quantise = functools.partial(lax.map, quantise)
    return jax.jit(quantise, out_shardings=shardings and dict(shardings))


def _num_inputs(path: str) -> int:
    """Returns the number of axes of a kernel that products sum over."""
    return 2 if path.endswith("/out/kernel") else 1


def dequantise_kernel(
    storage: WeightStorage,
    path: str,
    arrays: Arrays,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Returns the kernel at `path`, of this shape."""

    def dequantise(arrays):
        return storage.dequantise(arrays, dtype)

    for _ in range(_num_stacks(path)):
        dequantise = jax.vmap(dequantise)
    return dequantise(arrays).reshape(shape)


def _num_stacks(path: str) -> int:
    """Returns the number of axes before those of a matrix: of layers, and of experts."""
    return path.startswith("layers/") + ("/experts/" in path)


def quantise_params(
    params: dict, storage: WeightStorage, mesh: jax.sharding.Mesh | None = None
) -> dict:
    """Replaces the kernels in `params` by their arrays, one leaf after the other; empties `params`.

    Args:
      params: parameters in floats, to which the caller keeps no other reference.
      storage: how kernels are stored.
      mesh: the devices over which the arrays are sharded; None: the default device.
    """
    flat, stored = flatten(params), {}
    params.clear()
    for path in list(flat):
        leaf = flat.pop(path)
        if not is_stored(path):
            stored[path] = leaf
            continue
        stored |= flatten({path: quantise_kernel(storage, path, leaf, mesh)})
    return nest(stored)


def dequantise_params(params: dict, storage: WeightStorage, shapes: Mapping[str, Any]) -> dict:
    """Replaces the arrays of kernels by floats; inverts `quantise_params` up to rounding.

    Args:
      params: parameters with stored kernels.
      storage: how they are stored.
      shapes: shape and dtype of every parameter without a storage, by path.
    """
    flat = flatten(params)
    for path in {kernel_of(path) for path in flat} - {None}:
        names = [name for name in flat if name.startswith(f"{path}/")]
        arrays = {name.removeprefix(f"{path}/"): flat.pop(name) for name in names}
        shape, dtype = shapes[path].shape, shapes[path].dtype
        flat[path] = dequantise_kernel(storage, path, arrays, shape, dtype)
    return nest(dict(sorted(flat.items())))


def kernel_shapes(
    storage: WeightStorage, path: str, shape: tuple[int, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the arrays of the kernel of this shape at `path`."""
    kernel = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(functools.partial(quantise_kernel, storage, path), kernel)


@dataclasses.dataclass(frozen=True)
class StoredKernel:
    """How a product reads the arrays of its matrix."""

    storage: WeightStorage
    # Shardings in which devices exchange arrays, by name; those without one XLA exchanges later,
    # as floats
    gathered: tuple[tuple[str, jax.sharding.NamedSharding], ...] = ()

    def matrix(self, arrays: Arrays, dtype: jax.typing.DTypeLike) -> Float[Array, "I O"]:
        arrays = arrays | {
            name: lax.with_sharding_constraint(arrays[name], sharding)
            for name, sharding in self.gathered
        }
        kernel = self.storage.dequantise(arrays, dtype)
        return kernel.reshape(kernel.shape[0], -1)
