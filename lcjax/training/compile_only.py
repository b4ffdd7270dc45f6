"""`train.py --compile_only --topology v5e:4x4`: the compiler's verdict before a chip is rented."""

import sys
from collections.abc import Sequence

import jax

from lcjax import config as config_lib
from lcjax.cost import gpu_compiler, tpu_compiler
from lcjax.cost.chips import Topology
from lcjax.cost.verdict import Verdict, verdict
from lcjax.errors import InputError
from lcjax.models import ModelConfig
from lcjax.parallel.sharding import AXES, make_mesh
from lcjax.training import abstract_step, batches, estimate
from lcjax.training.config import TrainConfig

FLAG = "--compile_only"


def main(argv: Sequence[str] | None = None) -> int:
    """0: the step fits; 1: it does not; 2: it cannot be asked."""
    words = list(sys.argv[1:] if argv is None else argv)
    found = []

    def run(config: TrainConfig) -> None:
        found.append(report(config, topology))

    try:
        words, options = estimate.options_of([word for word in words if word != FLAG], "topology")
        if not options["topology"]:
            raise InputError(f"{FLAG} needs the devices to compile for: --topology v5e:4x4")
        topology = Topology.parse(options["topology"])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # The devices are another machine's: those of this one must not be opened for it.
    jax.config.update("jax_platforms", "cpu")
    code = config_lib.main(TrainConfig, run, words)
    return code or int(not found[0].fits)


def report(config: TrainConfig, topology: Topology) -> Verdict:
    """Compiles the step of `config` for `topology` and prints what the compiler says."""
    found, model, mesh = compile_step(config, topology)
    sizes = " ".join(f"{axis}={mesh.shape[axis]}" for axis in AXES)
    print(f"one update on {topology} ({mesh.size} devices, {sizes}), compiled in", end=" ")
    print(f"{found.seconds:.0f} s; per device:")
    flops = step_flops(config, model) / mesh.size
    print(
        f"FLOPs              {flops / 1e12:9.1f} T (the model's, nothing counted twice);"
        f" {flops / topology.chip.peak:.2f} s at the peak of {topology.chip.name}"
    )
    print(found)
    print(*(f"{line}\n" for line in estimate.undivided(model, mesh)), sep="", end="")
    return found


def compile_step(
    config: TrainConfig, topology: Topology
) -> tuple[Verdict, ModelConfig, jax.sharding.Mesh]:
    compiler = tpu_compiler if topology.tpu else gpu_compiler
    mesh = make_mesh(config.mesh, compiler.devices(topology))
    model = abstract_step.model_of(config)
    return verdict(abstract_step.lower(config, model, mesh), topology.chip), model, mesh


def step_flops(config: TrainConfig, model: ModelConfig) -> float:
    """Of one update on all devices: products forward and backward, repeated ones counted once."""
    per_token = estimate.flops(config, model).training_flops
    return per_token * batches.row_length(config, model) * config.train.batch_size
