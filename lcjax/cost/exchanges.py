"""What devices send to each other: between slices, and to attend to a text that they share.

Bytes follow from shapes, as the programs of `pallas_kernels.sharded` and of the sharding rules send
them, and times are bytes divided by the bandwidth of links (`lcjax.cost.chips`). Links of a real
machine reach less, and a message takes some microseconds at least, so these are lower bounds.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from lcjax.cost import resources
from lcjax.cost.chips import Topology
from lcjax.errors import InputError
from lcjax.models import ModelConfig
from lcjax.models.remat import recomputes
from lcjax.parallel.context import CHOICES
from lcjax.parallel.sharding import AXES, LENGTH, Mesh


def received_from_slices(
    config: ModelConfig,
    sizes: Mapping[str, int],
    spans: Mapping[str, int],
    *,
    trained: Callable[[str], bool] = lambda path: True,
    accumulation: int = 1,
) -> float:
    """Returns the bytes that a device receives from other slices in an update.

    Slices with copies of the model (`data`) sum their gradients. Slices that share the weights
    (`fsdp`) also send them, forward and backward. Both are sent in every microbatch, in the compute
    dtype. What slices send along other axes is not counted.

    Args:
      config: the model.
      sizes: of the mesh axes.
      spans: into how many slices each axis is split (`sharding.spans_of_slices`).
      trained: whether the parameter at a path is trained.
      accumulation: microbatches of an update.
    """
    held, size = resources.per_device(config, sizes), jnp.dtype(config.dtype).itemsize
    weights = sum(min(nbytes, size * count) for count, nbytes in held.values())  # or their codes
    gradients = size * sum(count for path, (count, _) in held.items() if trained(path))
    copies, parts = spans["data"], spans["fsdp"]
    summed = 2 * (copies - 1) / copies * gradients
    return accumulation * (summed + (parts - 1) * (2 * weights + gradients))


class Exchange(NamedTuple):
    """What a device sends in a layer to the devices that share its text, forward and backward."""

    method: str  # of `pallas_kernels.sharded.METHODS`, or `state` in a layer without attention
    group: int  # neighbouring devices that exchange heads
    sent: float  # bytes
    seconds: float  # of sending them
    exposed: float  # seconds in which attention has to wait
    gathered: float  # bytes of keys and values that a device holds, beside its own


def num_with_attention(config: ModelConfig) -> int:
    """Returns the number of layers that have attention."""
    return sum(count for layer, count in config.layer_counts if layer.mixer is None)


def context_exchanges(
    config: ModelConfig,
    mesh: Mesh,
    spans: Mapping[str, int],
    topology: Topology,
    length: int,
    rows: int,
    mfu: float,
) -> list[Exchange]:
    """Returns the exchanges of layers with attention that the heads allow, one per strategy.

    Of layers that differ it is the mean.

    Attention waits for exchanged heads, for gathered keys, and in a ring for what takes longer to
    send than the products with the keys of a hop take, with `mfu` of the peak, and for the return
    of the gradients of keys and values. Bytes are those of `pallas_kernels.sharded`.

    Args:
      config: the model.
      mesh: sizes of the axes.
      spans: into how many slices each axis is split (`sharding.spans_of_slices`).
      topology: the devices.
      length: tokens of a text.
      rows: texts of a microbatch on all devices.
      mfu: fraction of the peak that products with keys and values reach.
    """
    near = mesh.shape[LENGTH] // spans[LENGTH]
    links, predicted = _Links.of(topology, mesh.shape, spans), []
    for method in filter(lambda choice: choice != "auto", CHOICES):
        try:
            plan = config.replace(context_parallel=method).context_strategy(mesh, length, near)
        except InputError:
            continue  # heads that cannot be shared
        if method != "usp" or plan.group < mesh.shape[LENGTH]:  # else it is all_to_all
            arguments = mesh.shape, links, plan, length, rows, mfu
            predicted.append(_mean_exchange(config, *arguments))
    return predicted


def _mean_exchange(config: ModelConfig, *arguments: Any) -> Exchange:
    """Returns the mean exchange of a layer with attention; `arguments` are those of `_exchange`."""
    counts = [(layer, count) for layer, count in config.layer_counts if layer.mixer is None]
    counts = counts or [(config, 1)]
    total = sum(count for _, count in counts)
    each = [(_exchange(layer, *arguments), count) for layer, count in counts]
    sums = (
        sum(count * exchange[field] for exchange, count in each) / total
        for field in range(2, len(Exchange._fields))
    )
    return Exchange(*each[0][0][:2], *sums)


def state_exchange(
    config: ModelConfig, mesh: Mesh, spans: Mapping[str, int], topology: Topology, rows: int
) -> Exchange | None:
    """Returns the exchange of a layer without attention, or None if the model has none.

    Every device gets what each other one sends (`Mixer.exchanged`), forward and in the pass that
    computes its results again, and sends as much for its gradient. The tokens after wait for it.
    Arguments are those of `context_exchanges`.
    """
    if not config.mixers:
        return None
    sent = max((mixer.exchanged() for mixer in config.mixers), key=lambda x: x.size)
    heads, *rest = sent.shape
    size = resources.divided(heads, mesh.shape["tensor"]) * math.prod(rest) * sent.dtype.itemsize
    size *= resources.rows_of_device(rows, mesh.shape)
    # The sum of the gradients of an all-gather passes as many bytes.
    runs = 2 + (config.remat != "none")
    seconds = runs * _Links.of(topology, mesh.shape, spans).gather(size)
    others = mesh.shape[LENGTH] - 1
    return Exchange("state", 1, runs * others * size, seconds, seconds, others * size)


def _exchange(config, sizes, links: "_Links", plan, length: int, rows: int, mfu: float) -> Exchange:
    """Returns the exchange of a layer with this config under the strategy `plan`."""
    devices, tensor, size = sizes[LENGTH], sizes["tensor"], config.compute_dtype().itemsize
    tokens = resources.rows_of_device(rows, sizes) * length // devices
    heads, keys = (resources.divided(n, tensor) for n in (config.num_heads, config.num_kv_heads))
    if heads % keys:
        heads, keys = config.num_heads, config.num_kv_heads
    group = {"usp": plan.group, "all_to_all": devices}.get(plan.method, 1)
    keys = math.lcm(keys, group)
    queries, pair = (n * config.head_dim * tokens * size for n in (heads, 2 * keys))
    gradients = 4 * pair / size  # float32
    seen = resources.visible_keys(config, length)  # 0 without attention
    products = 4 * heads * config.head_dim * seen * tokens
    attention = products / (links.topology.chip.peak * mfu)
    hops = devices // group - 1 if plan.method in ("ring", "usp") else 0
    # The forward pass is repeated where the backward pass computes its results again. The only hop
    # of two groups is no loop, and compilers merge its repetition with that of the backward pass.
    again_attention = 1 + (recomputes(config.remat, "attention") and hops > 1)
    again = 1 + (config.remat != "none")
    sent = seconds = exposed = gathered = 0.0
    if group > 1:  # q, k, v and the output, and their gradients
        heads_sent = (2 * queries + pair) * (again + 1)
        log_sums = 4 * heads * tokens * again
        sent += (heads_sent + log_sums) * (group - 1) / group
        seconds += links.all_to_all(heads_sent + log_sums, group)
        exposed = seconds
    if plan.method == "all_gather":
        sent += (devices - 1) * (pair * again + gradients)
        seconds += again * links.gather(pair) + links.gather(gradients)
        exposed, gathered = seconds, (devices - 1) * pair
    if hops:
        sent += hops * (pair * (again_attention + 1) + gradients) + pair
        forward, backward = links.hop(pair, group), links.hop(gradients, group)
        seconds += hops * (forward * (again_attention + 1) + backward) + forward
        compute = attention / (hops + 1)  # forward, and twice as much backward
        waits = again_attention * max(0.0, forward - compute)
        waits += max(0.0, forward + backward - 2 * compute)
        exposed += hops * waits + forward
        gathered = pair
    return Exchange(plan.method, plan.group, sent, seconds, exposed, gathered)


class _Line(NamedTuple):
    """Devices of the context axis along one axis of a torus."""

    length: int
    is_ring: bool  # the last one has a link to the first one


class _Links(NamedTuple):
    """The links between the devices that share a text."""

    topology: Topology
    slices: int  # over which the devices are spread
    near: int  # devices of each
    lines: tuple[_Line, ...]  # that `near` devices fill in a torus, the last one first; (): GPUs

    @classmethod
    def of(cls, topology: Topology, sizes: Mapping[str, int], spans: Mapping[str, int]) -> "_Links":
        near = {axis: sizes[axis] // spans[axis] for axis in AXES}
        lines = _lines(topology, near) if topology.tpu else ()
        return cls(topology, spans[LENGTH], near[LENGTH], lines)

    def gather(self, size: float) -> float:
        """Returns the seconds in which every device gets the `size` bytes of each other one."""
        chip, width = self.topology.chip, sum(1 + line.is_ring for line in self.lines) or 1
        seconds = (self.near - 1) * self.slices * size / (width * chip.link)
        return seconds + _over_network(chip, (self.slices - 1) * size)

    def hop(self, size: float, group: int) -> float:
        """Returns the seconds in which every device sends `size` bytes to the next group."""
        chip = self.topology.chip
        if self.slices > 1:
            return _over_network(chip, size)
        for line in self.lines:  # groups that fill lines are neighbours
            if group == 1:
                break
            group = group // line.length if group % line.length == 0 else group
        return (group if self.lines else 1) * size / chip.link

    def all_to_all(self, size: float, group: int) -> float:
        """Returns the seconds in which groups of devices exchange all parts of `size` bytes.

        Of the bytes of n devices in a ring half take each direction, n / 4 links far on average. In
        a line a quarter passes its middle link in each direction.
        """
        chip, inside = self.topology.chip, min(group, self.near)
        slices, seconds = group // inside, 0.0
        for line in self.lines:
            length = min(line.length, inside)
            is_ring = line.is_ring and length == line.length
            seconds = max(seconds, length * size / ((8 if is_ring else 4) * chip.link))
            inside = max(1, inside // length)
        if not self.lines:
            seconds = size * (inside - 1) / inside / chip.link
        return seconds + _over_network(chip, size * (slices - 1) / slices)


def _over_network(chip, size: float) -> float:
    """Returns the seconds of sending to other slices; infinite, if the bandwidth is unknown."""
    return 0.0 if size == 0 else size / chip.network if chip.network else math.inf


def _lines(topology: Topology, sizes: Mapping[str, int]) -> tuple[_Line, ...]:
    """Returns the axes of the torus that the context axis fills.

    As in `jax.experimental.mesh_utils`, the last axis of a mesh gets axes of the torus first, and
    as many as possible. An axis of the mesh that fills none is a part of one.
    """
    free, lengths = dict(enumerate(topology.shape)), {}
    for axis in filter(lambda axis: sizes[axis] > 1, reversed(AXES)):
        counts = range(len(free), 0, -1)
        sets = itertools.chain.from_iterable(itertools.combinations(free, n) for n in counts)
        filled = next((x for x in sets if math.prod(free[i] for i in x) == sizes[axis]), ())
        lengths[axis] = [free.pop(i) for i in reversed(filled)]
    # A torus of three dimensions closes axes of a multiple of 4 chips, one of two those of 16.
    rings = (lambda n: n % 4 == 0) if topology.chip.dimensions == 3 else (lambda n: n == 16)
    lines = tuple(_Line(n, rings(n)) for n in lengths.get(LENGTH, ()))
    return lines or (_Line(sizes[LENGTH], False),)
