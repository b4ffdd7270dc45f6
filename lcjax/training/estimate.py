"""What training a config costs on given devices, by arithmetic: memory, speed and hours."""

import dataclasses
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import jax

from lcjax import config as config_lib
from lcjax import cost
from lcjax.cost.chips import Topology
from lcjax.errors import InputError
from lcjax.models import ModelConfig
from lcjax.parallel import sharding
from lcjax.parallel.sharding import AXES, Mesh, mesh_sizes
from lcjax.training import abstract_step, batches
from lcjax.training.config import TrainConfig
from lcjax.training.partition import matcher

# Share of the peak that Llama-like models of 7B reach on TPUs and GPUs when things go well.
MFU = 0.4


def main(argv: Sequence[str] | None = None) -> int:
    """0: it fits; 1: it does not; 2: it cannot be said."""
    words, fits = list(sys.argv[1:] if argv is None else argv), []
    try:
        words, options = options_of(words, "length", "topology", "mfu")
        topology = Topology.parse(options["topology"] or "")
        mfu = _number(options["mfu"] or str(MFU), "mfu")
        if options["length"]:
            words.append(f"--data.length={options['length']}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def run(config: TrainConfig) -> None:
        fits.append(report(config, topology, mfu))

    code = config_lib.main(TrainConfig, run, words)
    return code or int(not all(fits))


def report(config: TrainConfig, topology: Topology, mfu: float) -> bool:
    """Prints the estimate; returns whether the memory of a device is enough."""
    mesh, model = mesh_sizes(config.mesh, topology.devices), abstract_step.model_of(config)
    batches.check_rows(config, dataclasses.asdict(mesh))
    length, train, chip = batches.row_length(config, model), config.train, topology.chip
    found = flops(config, model)
    memory = training_memory(config, model, mesh)
    cached = cost.generation_memory(model, length, 1, mesh).cache
    tokens = train.steps * train.batch_size * length
    speed = mfu * chip.peak * topology.devices / found.training_flops
    sizes = " ".join(f"{axis}={getattr(mesh, axis)}" for axis in AXES)
    print(
        f"{topology}: {topology.devices} devices, {sizes}; rows of {length:,} tokens,"
        f" {train.batch_size} an update\n"
        f"parameters         {found.parameters:,}, of which {found.trained_parameters:,} trained\n"
        f"FLOPs per token    {found.training_flops / 1e9:.1f} G ({found.forward_flops / 1e9:.1f} G"
        f" forward); {found.training_flops * tokens:.2e} in all\n"
        "memory per device, estimated: a quarter more or less, with adapters a third less"
    )
    notes = {
        "cache": " (of one text of this length being generated; not in training)",
        "host": " (beside the device, in its host's memory)",
    }
    waiting = {"host": memory.host} if memory.host else {}
    for name, size in (memory.parts | {"cache": cached} | waiting).items():
        if size or name != "context":  # that of texts which are generated
            print(f"  {name:16} {size / 1e9:8.2f} GB{notes.get(name, '')}")
    print(*(f"  {line}\n" for line in undivided(model, mesh)), sep="", end="")
    fits = memory.total <= chip.usable
    print(
        f"  training         {memory.total / 1e9:8.2f} GB of {chip.usable / 1e9:.2f} GB that"
        f" {chip.name} leaves to a program: {'fits' if fits else 'does not fit'}\n"
        f"speed              {speed:,.0f} tokens/s at {mfu:.0%} of {chip.peak / 1e12:.0f} TFLOP/s\n"
        f"time               {tokens / speed / 3600:.1f} h, "
        f"{tokens / speed / 3600 * topology.devices:,.0f} chip hours for {tokens:.3g} tokens"
    )
    return fits


def training_memory(
    config: TrainConfig, model: ModelConfig, mesh: Mesh | jax.sharding.Mesh
) -> cost.Memory:
    """`cost.training_memory` of the largest moment of `config`: one microbatch's update."""
    train = config.train
    return cost.training_memory(
        model,
        batches.row_length(config, model),
        train.batch_size // train.accumulation,
        mesh,
        trained=matcher(train.rules(), "train.trainable"),
        average=train.ema is not None,
        offload=train.offload,
        context=_context(config),
    )


def flops(config: TrainConfig, model: ModelConfig) -> cost.Cost:
    """`cost.estimate` of the rows that `config` trains on, and of the weights that it trains."""
    return cost.estimate(
        model,
        batches.row_length(config, model),
        trained=matcher(config.train.rules(), "train.trainable"),
        context=_context(config),
    )


def _context(config: TrainConfig) -> tuple[int, int] | None:
    chunks = config.data.chunks
    return None if chunks is None else (chunks.count, chunks.length)


def of_run(
    config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh, limit: int | None = None
) -> list[str]:
    """What a run is told when it starts: its memory, and a warning where that is too much.

    `limit`: bytes of a device; None asks the device, which a CPU does not answer.
    """
    memory = training_memory(config, model, mesh)
    said = [f"memory, estimated: {memory}", *undivided(model, mesh)]
    limit = limit or (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    if limit and memory.total > limit:
        said.append(
            f"warning: a device has {limit / 1e9:.1f} GB; if memory runs out, raise"
            " train.accumulation or mesh.context, set model.remat=full or train.offload, or take"
            " more devices"
        )
    return said


def undivided(model: ModelConfig, mesh: Mesh | jax.sharding.Mesh) -> list[str]:
    """A line about the parameters that a mesh does not split as far as it goes; none if it does."""
    sizes = SimpleNamespace(shape=dataclasses.asdict(mesh)) if isinstance(mesh, Mesh) else mesh
    shapes = cost.parameter_shapes(model)
    found = sharding.undivided(sizes, shapes)
    if not found:
        return []
    first = sorted(found, key=found.get, reverse=True)[:3]
    named = ", ".join(f"{path} {list(shapes[path].shape)}" for path in first)
    more = f" and {len(found) - len(first)} more" if len(found) > len(first) else ""
    each = " ".join(f"{axis}={size}" for axis, size in sizes.shape.items() if size > 1)
    return [
        f"not split as the mesh ({each}) asks, since it does not divide them: {named}{more};"
        f" {sum(found.values()) / 1e6:,.1f} MB more of weights on each device, and what is trained"
        " has its gradient and moments beside it"
    ]


def options_of(words: list[str], *names: str) -> tuple[list[str], dict[str, str | None]]:
    """The words that are keys of a config, and the values of the options `names` among them.

    Ends where they ask for help, which must not depend on what else is given.
    """
    if {"-h", "--help"} & set(words):
        config_lib.parse(TrainConfig, ["--help"])
    words, rest, found = list(words), [], dict.fromkeys(names)
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        if key.removeprefix("--") in found and key.startswith("--"):
            found[key[2:]] = value if equals else (words.pop(0) if words else "")
        else:
            rest.append(word)
    return rest, found


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise InputError(f"--{name}={text} must be a share of the peak above 0, at most 1, as 0.4")
    return value
