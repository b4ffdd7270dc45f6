"""Mixtures of experts: a router chooses a few of many MLPs for each token.

    p = softmax(x Wr) over all E experts,   y = sum over the k largest p_e of  s_e MLP_e(x)

with s_e = p_e, or p_e over their sum (Shazeer et al. 2017, arXiv 1701.06538; Mixtral, Jiang et al.
2024, arXiv 2401.04088, sec. 2.1; OLMoE, Muennighoff et al. 2024, arXiv 2409.02060, sec. 2). Llama 4
has sigmoids for p and multiplies inputs, MLP_e(s_e x). All tokens also pass a shared expert if the
model has one (DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066, sec. 3.2), which is a plain MLP
(`lcjax.models.mlp.SparseMLP`). Gemma 4 has norms around the branches of the shared expert and of
the others, and a learned factor of each s_e.

No token is dropped. The (token, expert) pairs are sorted by expert into groups of rows
(`pallas_kernels.rows`), each of which starts at a multiple of a block, and `grouped_matmul`
multiplies every block by the weights of its expert.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from lcjax.errors import InputError, Interval, OneOf, PositiveInt, Range, check_fields
from lcjax.models.tiles import over_tiles, tile_size
from lcjax.models.weight_storage import WeightStorage
from lcjax.parallel.sharding import spec_of, spread_over, tokens_spec
from pallas_kernels.grouped import gpu_kernels
from pallas_kernels.rows import Groups, block_owners, combine_rows, group_rows, take_rows

MAX_EXPERTS = 4_096  # of a layer; published mixtures have up to 512


@dataclasses.dataclass(frozen=True)
class Experts:
    """Options of the experts that replace the MLP of each layer."""

    count: Annotated[int, Range(1, MAX_EXPERTS)]  # E
    top_k: PositiveInt = 2  # experts that compute a token
    width: PositiveInt | None = None  # F of an expert; null: `model.mlp_width`
    # The weights p of experts from the logits of the router
    scores: Annotated[str, OneOf(("softmax", "sigmoid"))] = "softmax"
    normalize: bool = True  # whether the weights of a token's experts are divided by their sum
    # What the weight of an expert multiplies: its output, or its input (Llama 4)
    weighted: Annotated[str, OneOf(("output", "input"))] = "output"
    shared_width: PositiveInt | None = None  # F of an expert that all tokens pass; null: none
    shared_gate: bool = False  # whether its output is multiplied by sigmoid(x w), w [D, 1] (Qwen)
    # Whether router and experts read hidden states with a norm of each, in place of the norm before
    # the MLP, and the outputs of experts and of the shared expert have norms (Gemma 4)
    branch_norms: bool = False
    # Whether a learned number multiplies the weight of each expert (Gemma 4)
    expert_scale: bool = False
    bias: bool = False  # of the router and of all experts (gpt-oss)
    # c: a gate of at most c and an up-projection of -c ... c, as gate sigmoid(alpha gate) (up + 1)
    # (gpt-oss); null: activation(gate) up
    swiglu_limit: Annotated[float, Interval(above=0)] | None = None
    swiglu_alpha: Annotated[float, Interval(above=0)] = 1.702
    # Factor of the load-balancing loss in training (`balance_loss`); 0: none
    balance: Annotated[float, Interval(least=0, hint="usual: 0.001 to 0.01")] = 0.001

    def __post_init__(self):
        check_fields("experts", self)
        if self.top_k > self.count:
            raise InputError(
                f"experts.top_k={self.top_k} must be at most experts.count={self.count}"
            )
        if self.shared_gate and self.shared_width is None:
            raise InputError(
                "experts.shared_gate=true multiplies the output of a shared expert, and"
                " experts.shared_width is null; set the width of this expert, or leave the gate out"
            )
        if self.branch_norms and self.shared_width is None:
            raise InputError(
                "experts.branch_norms=true is for mixtures beside a shared expert, and"
                " experts.shared_width is null; set the width of this expert, or leave norms out"
            )


def gated(
    experts: Experts, activate: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the function from the gate and the up-projection to the hidden units of an expert."""
    if experts.swiglu_limit is None:
        return lambda gate, up: activate(gate) * up

    def clamped(gate, up):
        gate = jnp.minimum(gate, experts.swiglu_limit)
        up = jnp.clip(up, -experts.swiglu_limit, experts.swiglu_limit)
        return gate * jax.nn.sigmoid(experts.swiglu_alpha * gate) * (up + 1)

    return clamped


class Load(NamedTuple):
    """Statistics of a router, summed over the tokens that count."""

    assignments: Float[Array, "... E"]  # tokens that each expert computes; no gradient
    probabilities: Float[Array, "... E"]  # sum of each expert's probabilities
    tokens: Float[Array, "..."]  # number of tokens


def route(
    logits: Float[Array, "M E"], experts: Experts
) -> tuple[Float[Array, "M E"], Float[Array, "M k"], Int[Array, "M k"]]:
    """Returns float32 probabilities of all experts, and weights and indices of the chosen ones.

    With sigmoid scores the probabilities are the scores over their sum, as in the load-balancing
    loss of DeepSeek-V3 (arXiv 2412.19437, eq. 19).
    """
    logits = logits.astype(jnp.float32)
    if experts.scores == "softmax":
        probabilities = jax.nn.softmax(logits, axis=-1)
        weights, chosen = lax.top_k(probabilities, experts.top_k)
    else:
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / scores.sum(-1, keepdims=True)
        largest, chosen = lax.top_k(logits, experts.top_k)  # large ones have equal scores of 1
        weights = jax.nn.sigmoid(largest)
    if experts.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return probabilities, weights, chosen


def router_load(
    probabilities: Float[Array, "M E"], chosen: Int[Array, "M k"], counted: Float[Array, "M"]
) -> Load:
    """Returns the load of one layer over the tokens for which `counted` is 1 instead of 0."""
    one_hot = jax.nn.one_hot(chosen, probabilities.shape[-1], dtype=jnp.float32).sum(1)
    assignments = lax.stop_gradient((one_hot * counted[:, None]).sum(0))
    return Load(assignments, (probabilities * counted[:, None]).sum(0), counted.sum())


def balance_loss(load: Load) -> Float[Array, ""]:
    """Returns the load-balancing loss E * sum_e f_e P_e; it is k if experts are used equally.

    f_e is the share of tokens that expert e computes and P_e its mean probability, both over the
    tokens of all layers (Fedus et al. 2022, arXiv 2101.03961, eq. 4 to 6, summed as in
    transformers' `load_balancing_loss_func`). The gradient passes through P alone.

    Args:
      load: arrays [..., E]; leading axes (layers) are summed.
    """
    count = load.assignments.shape[-1]
    assignments, probabilities = (x.reshape(-1, count).sum(0) for x in load[:2])
    total = jnp.maximum(load.tokens.sum(), 1)
    return count * ((assignments / total) * (probabilities / total)).sum()


class Kernels(NamedTuple):
    """The weights of experts, in any dtype, or dicts of arrays (`lcjax.models.weight_storage`)."""

    gate: Float[Array, "E D F"] | dict[str, jax.Array]
    up: Float[Array, "E D F"] | dict[str, jax.Array]
    down: Float[Array, "E F D"] | dict[str, jax.Array]


class Biases(NamedTuple):
    """The biases of the router and of experts, in any dtype."""

    router: Float[Array, " E"]
    gate: Float[Array, "E F"]
    up: Float[Array, "E F"]
    down: Float[Array, "E D"]


def mixture(
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    kernels: Kernels,
    counted: Float[Array, "B T"] | None,
    biases: Biases | None = None,
    router_input: Float[Array, "B T D"] | None = None,
    scales: Float[Array, " E"] | None = None,
    *,
    experts: Experts,
    activate: Callable[[jax.Array], jax.Array],
    storage: WeightStorage | None = None,
    mesh: jax.sharding.Mesh | None = None,
    by_tiles: bool = False,
) -> tuple[Float[Array, "B T D"], Load | None]:
    """Computes a mixture of experts.

    On a mesh, each device sorts its own tokens; XLA alone would gather all of them to sort. Devices
    along the axis `expert` gather their tokens, apply their own experts to those that chose them,
    and add up the results by a reduce-scatter.

    Args:
      x: hidden states.
      router: the weights of the router.
      kernels: the weights of the experts.
      counted: 1 for tokens that count in the load, 0 for others; None: no load is returned.
      biases: those of the router and of the experts; None: there are none.
      router_input: what the router reads; None: x.
      scales: factors of the weights of experts; None: there are none.
      experts: how tokens are routed.
      activate: the activation of the gate.
      storage: how the weights of the experts are stored; None: as floats.
      mesh: the devices that share tokens and weights; None: one device.
      by_tiles: whether experts compute one tile of tokens after the other (`lcjax.models.tiles`).

    Returns:
      The output in the dtype of x, and the load or None.
    """

    hidden_units = gated(experts, activate)

    def apply(x, weights, chosen, kernels, biases, *, traced_count=False):
        def of_tile(learned, arrays):
            kernels, biases = learned
            options = {"storage": storage, "traced_count": traced_count}
            options["weighted"] = experts.weighted
            return apply_experts(*arrays, kernels, hidden_units, biases, **options)

        count = chosen.shape[0]
        num_bytes = _bytes_per_token(x, chosen, _codes(kernels.gate, storage))
        tile = tile_size(count, num_bytes, mesh) if by_tiles else count
        return over_tiles(of_tile, (kernels, biases), (x, weights, chosen), tile)

    def compute(x, router, kernels, counted, biases, router_input, scales, layout=None):
        flat = x.reshape(-1, x.shape[-1])
        read = flat if router_input is None else router_input.reshape(flat.shape)
        # With an accelerator's default precision of float32, the router chooses other experts.
        logits = _dot(read, router.astype(read.dtype), 1, 0)
        if biases is not None:
            logits = logits + biases.router.astype(logits.dtype)
        probabilities, weights, chosen = route(logits, experts)
        if scales is not None:
            weights = weights * scales.astype(jnp.float32)[chosen]
        load = None
        if counted is not None:
            load = router_load(probabilities, chosen, counted.reshape(-1))
        if layout is None:
            y = apply(flat, weights, chosen, kernels, biases)
        else:
            y = layout.apply(flat, weights, chosen, kernels, biases, apply)
            load = lax.psum(load, layout.token_axes) if load and layout.token_axes else load
        return y.astype(x.dtype).reshape(x.shape), load

    if mesh is None or mesh.size == 1:
        return compute(x, router, kernels, counted, biases, router_input, scales)
    tokens = tokens_spec(mesh, *x.shape[:2])
    if storage is not None:
        kernels = Kernels(*(jax.vmap(storage.with_scales)(arrays) for arrays in kernels))
    specs = Kernels(
        *(
            jax.tree_util.tree_map_with_path(
                lambda keys, array, path=f"experts/{name}/kernel": spec_of(
                    "/".join((path, *(key.key for key in keys))), array.shape, mesh
                ),
                kernel,
            )
            for name, kernel in kernels._asdict().items()
        )
    )
    bias_specs = biases and Biases(
        PartitionSpec(),
        *(
            spec_of(f"experts/{name}/bias", getattr(biases, name).shape, mesh)
            for name in Kernels._fields
        ),
    )
    if "tensor" not in spread_over(_codes(specs.down, storage)):
        # Blocks of codes are whole on a device, and these do not divide: nor may hidden units.
        specs, bias_specs = jax.tree.map(
            _without_tensor, (specs, bias_specs), is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
    return jax.shard_map(
        functools.partial(compute, layout=_ExpertLayout(spread_over(tokens), specs, storage)),
        mesh=mesh,
        in_specs=(*(tokens, PartitionSpec(), specs, tokens, bias_specs, tokens, PartitionSpec()),),
        out_specs=(tokens, PartitionSpec()),
        check_vma=False,
    )(x, router, kernels, counted, biases, router_input, scales)


def _without_tensor(spec: PartitionSpec) -> PartitionSpec:
    cuts = (spread_over(PartitionSpec(cut)) for cut in spec)
    return PartitionSpec(*(tuple(axis for axis in cut if axis != "tensor") or None for cut in cuts))


def _codes(kernel: Any, storage: WeightStorage | None) -> Any:
    """Returns the array of a kernel with an expert on its first axis and outputs on its last."""
    return kernel if storage is None else kernel[storage.codes]


def _bytes_per_token(x: jax.Array, chosen: jax.Array, gate: jax.Array) -> int:
    """Returns the bytes of the rows that one token has in `apply_experts`, and of gradients."""
    width, hidden = x.shape[-1], gate.shape[-1]
    return 2 * chosen.shape[1] * (3 * hidden + 2 * width) * x.dtype.itemsize


class _ExpertLayout(NamedTuple):
    """How the devices of a mesh share tokens and the weights of experts."""

    token_axes: tuple[str, ...]  # mesh axes over which tokens are sharded
    specs: Kernels  # the partition spec of each weight
    storage: WeightStorage | None  # of the weights

    def apply(self, x, weights, chosen, kernels, biases, apply):
        """Applies the experts, by `apply`, to each device's tokens, inside a `shard_map`."""
        split, *_, over_width = _codes(self.specs.gate, self.storage)
        if self.storage is None:
            kernels = Kernels(*(kernel.astype(x.dtype) for kernel in kernels))
        kernels = jax.tree.map(_whole, kernels, self.specs)
        inputs, exchanges = (x, weights, chosen), split in self.token_axes
        if exchanges:
            inputs = lax.all_gather(inputs, split, tiled=True)
        x, weights, chosen = inputs
        if split:
            count = _codes(kernels.gate, self.storage).shape[0]
            chosen = chosen - lax.axis_index(split) * count
        if biases is not None and over_width:  # the sum over devices has it once
            is_first = lax.axis_index(over_width) == 0
            biases = biases._replace(down=jnp.where(is_first, biases.down, 0))
        y = apply(x, weights, chosen, kernels, biases, traced_count=split is not None)
        if exchanges:
            y = lax.psum_scatter(y, split, tiled=True)
        elif split:
            y = lax.psum(y, split)
        return lax.psum(y, over_width) if over_width else y


def _whole(kernel: jax.Array, spec: PartitionSpec) -> jax.Array:
    """All-gathers a kernel, or an array of its codes, along the axis that is sharded over `fsdp`.

    The gradient of the all-gather is a reduce-scatter.
    """
    for axis, cut in enumerate(spec):
        axes = spread_over(PartitionSpec(cut))
        if "fsdp" in axes:
            kernel = lax.all_gather(kernel, axes, axis=axis, tiled=True)
    return kernel


def apply_experts(
    x: Float[Array, "M D"],
    weights: Float[Array, "M k"],
    chosen: Int[Array, "M k"],
    kernels: Kernels,
    hidden_units: Callable[[jax.Array, jax.Array], jax.Array],
    biases: Biases | None = None,
    *,
    weighted: str = "output",
    storage: WeightStorage | None = None,
    traced_count: bool = False,
) -> Float[Array, "M D"]:
    """Returns the float32 sum of the outputs of each token's chosen experts.

    Args:
      x: hidden states.
      weights: weights of the chosen experts.
      chosen: indices of experts; indices outside 0 ... E - 1 contribute nothing.
      kernels: weights of E experts.
      hidden_units: those of a gate and an up-projection (`gated`).
      biases: the biases of the experts; None: there are none.
      weighted: what the weights multiply, the `output` or the `input` of experts.
      storage: how the kernels are stored; None: as floats.
      traced_count: whether many of `chosen` may be outside 0 ... E - 1, so that the number of
        blocks is counted at run time.
    """
    count = _codes(kernels.gate, storage).shape[0]
    groups = group_rows(chosen, count)

    def product(x, name):
        options = {"block": groups.block, "traced_count": traced_count, "storage": storage}
        y = grouped_matmul(x, getattr(kernels, name), groups.sizes, **options)
        y = checkpoint_name(y, "product")  # for remat=dots
        return y if biases is None else _add_bias(y, getattr(biases, name), groups)

    rows = take_rows(x, groups.token, groups.places)
    if weighted == "input":
        flat, places = weights.reshape(-1, 1).astype(x.dtype), groups.places.reshape(-1, 1)
        rows, weights = rows * take_rows(flat, groups.pair, places), jnp.ones_like(weights)
    with jax.named_scope("experts"):
        hidden = hidden_units(product(rows, "gate"), product(rows, "up"))
        out = product(hidden, "down")
    return combine_rows(out, weights.astype(jnp.float32), groups)


def _add_bias(y: Float[Array, "R O"], bias: Float[Array, "E O"], groups: Groups) -> jax.Array:
    """Adds to each row the bias of its expert; rows after the last group may get any.

    A product selects the rows of `bias`, since the gradient of a gather would be a scatter, which
    adds in any order on GPUs.
    """
    blocks = y.reshape(-1, groups.block, y.shape[-1])
    owners = block_owners(groups.sizes, blocks.shape[0], groups.block)
    one_hot = jax.nn.one_hot(owners, bias.shape[0], dtype=y.dtype)
    return (blocks + _dot(one_hot, bias.astype(y.dtype), 1, 0)[:, None]).reshape(y.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _grouped_matmul(x, w, sizes, block, traced_count, storage):
    return _products(x, _matrices(w, storage, x.dtype), sizes, block, traced_count)


def _matrices(w: Any, storage: WeightStorage | None, dtype: jnp.dtype) -> jax.Array:
    """Returns the matrices [E, I, O]; of stored ones, as floats of this dtype."""
    if storage is None:
        return w
    return jax.vmap(lambda arrays: storage.dequantise(arrays, dtype))(w)


def grouped_matmul(
    x: Float[Array, "R I"],
    w: Float[Array, "E I O"] | dict[str, jax.Array],
    sizes: Int[Array, "E"],
    *,
    block: int = 1,
    traced_count: bool = False,
    storage: WeightStorage | None = None,
) -> Float[Array, "R O"]:
    """Multiplies each group of rows by the matrix of the group, as `jax.lax.ragged_dot` does.

    On CPUs, a loop multiplies one block at a time by the matrix of its group, because XLA's CPU
    compiler lowers `ragged_dot` to the product of all rows with all matrices. Each matrix is
    converted to the dtype of x when it is used. TPUs use `ragged_dot`, and a Pallas kernel for the
    gradient of w; NVIDIA GPUs kernels of `pallas_kernels.grouped`, or else the loop.

    Args:
      x: rows of group 0, then of group 1, and so on; rows after the last group give 0.
      w: the matrix of each group, of any dtype.
      sizes: rows of each group, multiples of `block`; some may be 0.
      block: rows that are multiplied at a time; divides R.
      traced_count: whether the groups may be far smaller than R, so that blocks are counted at run
        time. In the loop a GPU then waits for the host after each block.
      storage: how w is stored. Then it has no gradient, and the backward pass dequantises it again
        (as `lcjax.models.layers.stored_matmul`); None: as floats.
    """
    return _grouped_matmul(x, w, sizes, block, traced_count, storage)


def _grouped_matmul_forward(x, w, sizes, block, traced_count, storage):
    y = _grouped_matmul(x, w, sizes, block, traced_count, storage)
    return y, (x if storage is None else None, w, sizes)


def _grouped_matmul_backward(block, traced_count, storage, saved, dy):
    x, w, sizes = saved
    if storage is not None:
        w = lax.optimization_barrier(w)
        matrices = _matrices(w, storage, dy.dtype)
        return _products(dy, matrices, sizes, block, traced_count, transpose=True), None, None
    dx = _products(dy, w, sizes, block, traced_count, transpose=True)
    return dx, _sums_of_products(x, dy, sizes, block, traced_count).astype(w.dtype), None


_grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)


def _products(x, w, sizes, block, traced_count, *, transpose=False):
    """Returns x W for each group, or x W^T with `transpose`."""
    branches = {
        "tpu": functools.partial(_ragged_products, transpose=transpose),
        "default": functools.partial(
            _block_products, block=block, traced_count=traced_count, transpose=transpose
        ),
    }
    if (kernels := gpu_kernels(x, w, block)) is not None:

        def by_kernel(x, w, sizes):
            owners = block_owners(sizes, x.shape[0] // block, block)
            return kernels.products(x, w, owners, block=block, transpose=transpose)

        branches["cuda"] = by_kernel
    return lax.platform_dependent(x, w, sizes, **branches)


def _ragged_products(x, w, sizes, *, transpose):
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return lax.ragged_dot_general(
        *(x, w.astype(x.dtype), sizes, dims), precision=_precision(x.dtype)
    )


def _block_products(x, w, sizes, *, block, traced_count, transpose):
    width = w.shape[1 if transpose else 2]
    owners, count = block_owners(sizes, x.shape[0] // block, block), w.shape[0]

    def multiply(index, out):
        owner = owners[index]
        kernel = _matrix(w, jnp.minimum(owner, count - 1))
        rows = lax.dynamic_slice_in_dim(x, index * block, block)
        y = _dot(rows, kernel.astype(x.dtype), 1, 1 if transpose else 0)
        y = jnp.where(owner < count, y, 0)
        return lax.dynamic_update_slice_in_dim(out, y, index * block, 0)

    out = _zeros((x.shape[0], width), x.dtype, sizes)
    return lax.fori_loop(0, _num_blocks(x, sizes, block, traced_count), multiply, out)


def _matrix(w, index):
    """Returns matrix `index` of w; slices 16-bit matrices as integers.

    Otherwise XLA for CPUs, which multiplies in float32, converts all matrices before the loop.
    """
    if w.dtype.itemsize != 2:
        return lax.dynamic_index_in_dim(w, index, keepdims=False)
    bits = lax.bitcast_convert_type(w, jnp.uint16)
    return lax.bitcast_convert_type(lax.dynamic_index_in_dim(bits, index, keepdims=False), w.dtype)


def _sums_of_products(x, dy, sizes, block, traced_count):
    """Returns the float32 gradient [E, I, O] of the matrices."""
    branches = {"default": functools.partial(_block_sums, block=block, traced_count=traced_count)}
    # The kernel for TPUs rounds float32, and the rows of its tiles are a multiple of 128.
    if not block % 128 and x.dtype.itemsize <= 2 and _tgmm() is not None:
        branches["tpu"] = functools.partial(_kernel_sums, block=block)
    if (kernels := gpu_kernels(x, dy[None], block)) is not None:
        branches["cuda"] = functools.partial(kernels.sums, block=block)
    return lax.platform_dependent(x, dy, sizes, **branches)


def _tgmm() -> Callable | None:
    """Returns JAX's Pallas kernel for the gradient of w; None if this JAX has none.

    For this product, XLA for TPUs lowers `ragged_dot` to E products of all rows.
    """
    try:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
    except ImportError:  # experimental
        return None
    return tgmm


def _kernel_sums(x, dy, sizes, *, block, interpret=False):
    tiles = block, 512, 512
    inputs = x.swapaxes(0, 1), dy, sizes
    return _tgmm()(*inputs, preferred_element_type=jnp.float32, tiling=tiles, interpret=interpret)


def _block_sums(x, dy, sizes, *, block, traced_count):
    count = sizes.shape[0]
    owners = block_owners(sizes, x.shape[0] // block, block)

    def add(index, sums):
        owner = owners[index]
        at = jnp.minimum(owner, count - 1)
        rows, slopes = (lax.dynamic_slice_in_dim(y, index * block, block) for y in (x, dy))
        product = jnp.where(owner < count, _dot(rows, slopes, 0, 0, jnp.float32), 0)
        total = lax.dynamic_index_in_dim(sums, at, keepdims=False) + product
        return lax.dynamic_update_index_in_dim(sums, total, at, 0)

    zeros = _zeros((count, x.shape[1], dy.shape[1]), jnp.float32, sizes)
    return lax.fori_loop(0, _num_blocks(x, sizes, block, traced_count), add, zeros)


def _zeros(shape, dtype, sizes):
    """Returns zeros that XLA cannot know, for a loop to write into.

    Of known ones, XLA for GPUs makes those of all layers when the program starts, and XLA for CPUs
    keeps an array from which each loop starts with a copy.
    """
    return jnp.full(shape, jnp.minimum(sizes[0], 0).astype(dtype))


def _num_blocks(x, sizes, block, traced_count):
    return sizes.sum() // block if traced_count else x.shape[0] // block


def _dot(x, y, axis_x, axis_y, dtype=None):
    contracted = (((axis_x,), (axis_y,)), ((), ()))
    precision = _precision(x.dtype)
    return lax.dot_general(x, y, contracted, precision=precision, preferred_element_type=dtype)


def _precision(dtype) -> lax.Precision | None:
    """Returns full precision for float32 operands, as in `lcjax.models.layers.matmul`."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
