"""Estimates the cost of training a config on given devices: memory, FLOPs, speed and hours.

All numbers come from arithmetic on shapes; nothing is loaded or compiled.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping

import jax
import tqdm

from lcjax import checkpoints, cost
from lcjax import config as config_lib
from lcjax.checkpoints.build import ModelSection, model_config, planned_config
from lcjax.checkpoints.hub import SMOLLM2
from lcjax.cost import exchanges
from lcjax.cost.chips import Topology
from lcjax.data import loader_bytes
from lcjax.errors import InputError
from lcjax.models import PRESETS, ModelConfig, preset, remat
from lcjax.models.model_config import HUB
from lcjax.parallel import sharding
from lcjax.parallel.device_memory import check_estimate, usable_bytes
from lcjax.parallel.sharding import Mesh, mesh_sizes
from lcjax.storage import to_path
from lcjax.training import batches
from lcjax.training.train_config import TrainConfig, matcher, trainable

MOST_TOKENS = 2**24  # of a longest text; tracing longer ones takes minutes
# Fraction of the peak that Llama-like models of 7B reach on TPUs and GPUs in good conditions.
MFU = 0.4


def report(config: TrainConfig, topology: Topology, mfu: float) -> bool:
    """Prints the estimate; returns whether it fits into the memory of a device."""
    check_language_model(config)
    mesh, model = mesh_sizes(config.mesh, topology.devices), model_of(config)
    batches.check_rows(config, mesh.shape)
    length, train, chip = batches.row_length(config, model), config.train, topology.chip
    spans = sharding.spans_of_slices(mesh, topology.slices, tpu=topology.tpu)
    near = mesh.context // spans["context"]
    plan = model.context_strategy(mesh, length, near)
    work = flops(config, model)
    estimated = training_memory(config, model, mesh, "tpu" if topology.tpu else "gpu")
    kv_cache = cost.generation_memory(model, length, 1, mesh).cache
    tokens = train.steps * train.batch_size * length
    speed = mfu * chip.peak * topology.devices / work.training_flops
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    active = f"; {work.active_parameters:,} compute a token" if model.experts else ""
    print(
        f"{topology}: {topology.devices} devices, {sizes}; rows of {length:,} tokens,"
        f" {train.batch_size} per update\n"
        f"parameters         {work.parameters:,}, of which {work.trained_parameters:,} trained"
        f"{active}"
    )
    print(*cost.layer_lines(model, length), sep="\n")
    print(
        f"FLOPs per token    {work.training_flops / 1e9:.1f} G ({work.forward_flops / 1e9:.1f} G"
        f" forward); {work.training_flops * tokens:.2e} in all\n"
        "memory per device, estimated (docs/benchmarks.md: estimates beside compilers)"
    )
    notes = {
        "cache": " (when generating one text of this length; not in training)",
        "host": " (in the memory of the device's host)",
    }
    host = {"host": estimated.host} if estimated.host else {}
    for name, size in (estimated.parts | {"cache": kv_cache} | host).items():
        if size or name != "context":  # the encoded context of a text that is generated
            print(f"  {name:16} {size / 1e9:8.2f} GB{notes.get(name, '')}")
    if model.evicts:
        held = cost.cache_bytes(model, length)
        print(f"  {'cache, cut':16} {held / 1e9:8.2f} GB (of a text after its cut, on all devices)")
    notes = [*storage_notes(model), *replication_notes(model, mesh)]
    print(*(f"  {line}\n" for line in notes), sep="", end="")
    if mesh.shape["context"] > 1:
        groups = f" in groups of {plan.group}" if plan.group > 1 else ""
        print(f"context            {plan.method}{groups}: {plan.reason}")
        rows = train.batch_size // train.accumulation
        layers = exchanges.num_with_attention(model)
        exchanged = exchanges.context_exchanges(model, mesh, spans, topology, length, rows, mfu)
        counted = [(x, layers) for x in exchanged if layers]
        if state := exchanges.state_exchange(model, mesh, spans, topology, rows):
            counted.append((state, model.num_layers - layers))
        update = train.batch_size * length / speed
        print(_exchange_table(counted, train.accumulation, update))
    if topology.slices > 1:
        print(_network_line(config, model, mesh, spans, topology))
    fits = estimated.total <= chip.usable
    print(
        f"  training         {estimated.total / 1e9:8.2f} GB of {chip.usable / 1e9:.2f} GB that"
        f" {chip.name} leaves to a program: {'fits' if fits else 'does not fit'}\n"
        f"speed              {speed:,.0f} tokens/s at {mfu:.0%} of {chip.peak / 1e12:.0f} TFLOP/s\n"
        f"time               {tokens / speed / 3600:.1f} h, "
        f"{tokens / speed / 3600 * topology.devices:,.0f} chip hours for {tokens:.3g} tokens"
    )
    return fits


def longest_report(config: TrainConfig, topology: Topology, mfu: float) -> bool:
    """Prints the longest texts that fit, by `model.remat`, `train.offload` and context strategy.

    Returns:
      Whether any text fits.
    """
    check_language_model(config)
    mesh, chip = mesh_sizes(config.mesh, topology.devices), topology.chip
    shards = mesh.shape["context"]
    step = 4096 * shards  # kernels copy what is no multiple of their blocks
    spans = sharding.spans_of_slices(mesh, topology.slices, tpu=topology.tpu)
    train, lines = config.train, []
    rows = train.batch_size // train.accumulation
    remats = dict.fromkeys((config.model.remat or "none", *remat.WORDS))
    offloads = dict.fromkeys((train.offload, "none", "optimizer"))
    for kind, offload in tqdm.tqdm(
        list(itertools.product(remats, offloads)), desc="longest texts", leave=False
    ):
        part = dataclasses.replace(config, train=dataclasses.replace(train, offload=offload))
        model = model_of(part).replace(remat=kind)
        platform = "tpu" if topology.tpu else "gpu"
        need = functools.cache(functools.partial(memory_of_length, part, model, mesh, platform))
        longest = longest_text(lambda n, need=need: need(n).total, chip.usable, step, MOST_TOKENS)
        cells = [f"{longest:>11,}", f"{need(longest).host / 1e9 if longest else 0:>8,.0f}"]
        if shards > 1 and longest:
            # What a strategy holds of others' keys takes the place of tokens.
            half = longest // 2 // step * step
            of_token = (need(longest).total - (need(half).total if half else 0)) / (longest - half)
            arguments = model, mesh, spans, topology, longest, rows, mfu
            for x in exchanges.context_exchanges(*arguments):
                fewer = longest * of_token / (of_token + x.gathered / longest)
                cells.append(f"{x.method} {int(fewer) // 1024 * 1024:,}")
        lines.append((longest, f"  {kind:10} {offload:10} {'  '.join(cells)}"))
    print(
        f"{topology}: longest texts that fit {chip.usable / 1e9:.1f} GB of each {chip.name} by the"
        f" estimate, {rows} in a microbatch; other settings are those of the config\n"
        f"  {'remat':10} {'offload':10} {'tokens':>11}  {'host, GB':>8}"
        + ("  with the keys of other devices that a strategy holds" if shards > 1 else "")
    )
    print(*(line for _, line in lines), sep="\n")
    return any(longest for longest, _ in lines)


def memory_of_length(
    config: TrainConfig, model: ModelConfig, mesh: Mesh, platform: str, length: int
) -> cost.MemoryEstimate:
    """Returns the memory of training on texts of `length` tokens; other arguments as there."""
    data = dataclasses.replace(config.data, length=length)
    return training_memory(dataclasses.replace(config, data=data), model, mesh, platform)


def longest_text(need: Callable[[int], float], usable: float, step: int, most: int) -> int:
    """Returns the largest multiple of `step` up to `most` that needs at most `usable`, or 0.

    The result may be a 64th too small. `need` rises with the length, and nearly on a line.
    """
    low, high, length = 0, 0, step
    while not high or high - low > max(step, high // 64):
        if need(length) <= usable:
            low = length
        else:
            high = length
        if not low:
            length = high // 2 // step * step
            if not length:
                return 0
        elif not high:
            if low >= most // step * step:
                return low
            length = min(8 * length, most // step * step)
        else:
            each = (need(high) - need(low)) / (high - low)
            guess = low + int((usable - need(low)) / each * 0.995)
            length = min(max(guess // step * step, low + step), high - step)
            if length == low:
                return low
    return low


def _exchange_table(
    counted: list[tuple[exchanges.Exchange, int]], accumulation: int, update: float
) -> str:
    """Returns the lines of a table of exchanges with the numbers of layers that have them.

    An update of `accumulation` microbatches takes `update` seconds without them.
    """
    titles = f"{'GB':>8} {'ms':>8} {'waits, ms':>10} {'update':>8} {'keys, GB':>9}"
    lines = [f"  {'sends in a layer':16} {titles}"]
    for x, layers in counted:
        waits = layers * accumulation * x.exposed
        name = f"{x.method} {x.group}" if x.group > 1 else x.method
        cells = f"{x.sent / 1e9:8.3g} {1e3 * x.seconds:8.3g} {1e3 * x.exposed:10.3g}"
        added = f"{waits / update:+8.1%}" if math.isfinite(waits) else "unknown"
        lines.append(f"  {name:16} {cells} {added:>8} {x.gathered / 1e9:9.3g}")
    return "\n".join(lines)


def received_from_slices(
    config: TrainConfig, model: ModelConfig, sizes: Mapping[str, int], spans: Mapping[str, int]
) -> float:
    """Returns the bytes that a device receives from other slices in an update."""
    return exchanges.received_from_slices(
        *(model, sizes, spans),
        trained=matcher(config.train.rules(), "train.trainable"),
        accumulation=config.train.accumulation,
    )


def _network_line(config, model, mesh: Mesh, spans: Mapping[str, int], topology: Topology) -> str:
    """Returns a line about what passes between slices in an update."""
    names = ", ".join(f"{axis} over {count}" for axis, count in spans.items() if count > 1)
    received = received_from_slices(config, model, mesh.shape, spans)
    network = topology.chip.network
    line = f"between slices     {names}"
    if received:
        line += f"; a device receives {received / 1e9:,.3g} GB in an update"
        line += f", {received / network:,.3g} s at {network / 1e9:.4g} GB/s" if network else ""
    others = " and ".join(axis for axis in ("tensor", "expert") if spans[axis] > 1)
    return line + (f"; what {others} exchange is not counted" if others else "")


def check_language_model(config: TrainConfig) -> None:
    """Raises an InputError for a config that trains a retriever, which has no estimate."""
    if config.retriever is not None:
        raise InputError(
            "estimates are for language models, and this config trains a retriever; run it with"
            " few steps (--train.steps=3) instead"
        )


def planned_model(config: TrainConfig) -> ModelConfig | None:
    """Returns the model that a run on this machine trains; None if only loading shows it."""
    model = planned_config(config.model)
    return None if model is None else _with_adapters(_with_landmarks(model), config)


def of_run(config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh) -> list[str]:
    """Returns the lines that a run prints at its start: its device memory, and a warning.

    Raises:
      InputError: the run needs more device memory than there is, without `run.ignore_memory`.
    """
    device = mesh.local_devices[0]
    estimated = _on_machine(training_memory(config, model, mesh), config, mesh)
    warning = check_estimate(
        estimated.total,
        device,
        f"train.batch_size={config.train.batch_size} rows of {batches.row_length(config, model):,}"
        f" tokens need about {estimated}",
        _way_out(config, model, device, estimated),
        ignore=config.run.ignore_memory,
    )
    notes = replication_notes(model, mesh)
    lines = [f"memory, estimated: {estimated}", *storage_notes(model), *notes]
    return [*lines, *([warning] if warning else [])]


def _on_machine(
    estimated: cost.MemoryEstimate, config: TrainConfig, mesh: jax.sharding.Mesh
) -> cost.MemoryEstimate:
    """Returns the memory of all devices of a CPU's machine with that of the process and the text.

    The memory of accelerators is unchanged, as the process and the text are on their hosts.
    """
    if mesh.local_devices[0].platform != "cpu":
        return estimated
    return estimated.on_cpu(len(mesh.local_devices), text=loader_bytes(config.data))


def _way_out(
    config: TrainConfig, model: ModelConfig, device: jax.Device, estimated: cost.MemoryEstimate
) -> str:
    """Returns the settings that lower the device memory of a run, for an error message."""
    train, changes = config.train, []
    if estimated.total - estimated.activations < (usable_bytes(device) or 0):
        if train.accumulation < train.batch_size:
            changes.append(f"raise train.accumulation={train.accumulation}")
        if model.remat != "full":
            changes.append("set model.remat=full")
        changes.append(f"lower data.length={config.data.length}")
    if train.lora is None:
        changes.append("train adapters (train.lora.rank=8)")
    if train.lora is not None and model.weights is None:
        changes.append("store frozen weights as codes (model.weights.type=nf4)")
    if model.param_dtype == "float32":
        changes.append("read frozen weights as bfloat16 (model.param_dtype)")
    if device.platform != "cpu":
        changes.append("raise mesh.context, set train.offload")
    return ", ".join([*changes, "use a smaller model or more devices"])


def training_memory(
    config: TrainConfig,
    model: ModelConfig,
    mesh: Mesh | jax.sharding.Mesh,
    platform: str | None = None,
) -> cost.MemoryEstimate:
    """Returns the peak memory per device, which one microbatch's update needs.

    Args:
      config: the config of the run.
      model: the model that it trains.
      mesh: the devices, or sizes of the mesh axes.
      platform: platform of the devices; None: that of the mesh, or TPUs.
    """
    train = config.train
    return cost.training_memory(
        model,
        batches.row_length(config, model),
        train.batch_size // train.accumulation,
        mesh,
        trained=matcher(train.rules(), "train.trainable"),
        average=train.ema is not None,
        offload=train.offload,
        accumulates=train.accumulation > 1,
        platform=platform,
        context=_context(config),
    )


def flops(config: TrainConfig, model: ModelConfig) -> cost.Cost:
    """Returns parameters and FLOPs per token for the rows and trained weights of `config`."""
    return cost.estimate(
        model,
        batches.row_length(config, model),
        trained=matcher(config.train.rules(), "train.trainable"),
        context=_context(config),
    )


def _context(config: TrainConfig) -> tuple[int, int] | None:
    chunks = config.data.chunks
    return None if chunks is None else (chunks.count, chunks.length)


def replication_notes(model: ModelConfig, mesh: Mesh | jax.sharding.Mesh) -> list[str]:
    """Returns a line about parameters that the mesh's axes do not divide, or an empty list."""
    shapes = cost.parameter_shapes(model)
    num_bytes = sharding.replicated_bytes(mesh, shapes)
    if not num_bytes:
        return []
    largest = sorted(num_bytes, key=num_bytes.get, reverse=True)[:3]
    names = ", ".join(f"{path} {list(shapes[path].shape)}" for path in largest)
    remainder = f" and {len(num_bytes) - 3} more" if len(num_bytes) > 3 else ""
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return [
        f"replicated, because the mesh ({sizes}) does not divide their sizes: {names}{remainder};"
        f" {sum(num_bytes.values()) / 1e6:,.1f} MB more of weights on each device, plus the"
        " gradients and moments of those that are trained"
    ]


def storage_notes(model: ModelConfig) -> list[str]:
    """Returns a line about how weights are stored, or an empty list if all are floats."""
    if model.weights is None:
        return []
    count, size = cost.stored_weights(model)
    return [
        f"weights: {count:,} in {model.weights.name}, {8 * size / count:.3f} bits each,"
        f" {size / 1e9:.2f} GB with scales; embeddings, head, norms, biases and routers in"
        f" {model.param_dtype}"
    ]


def model_of(config: TrainConfig) -> ModelConfig:
    """Returns the model that `config` trains on an accelerator, adapters included."""
    return _with_adapters(_without_adapters(config), config)


def _with_adapters(model: ModelConfig, config: TrainConfig) -> ModelConfig:
    gates = config.train.head_gates
    model = model if gates is None else gates.in_model(model)
    return model.replace(lora=config.train.lora or model.lora)


def _without_adapters(config: TrainConfig) -> ModelConfig:
    section = config.model
    if section.dtype is None:
        section = dataclasses.replace(section, dtype="bfloat16")
    memory = section.memory
    if memory is not None and memory.encoder is not None:
        memory = dataclasses.replace(memory, encoder=_local_encoder(memory.encoder))
        section = dataclasses.replace(section, memory=memory)
    return _with_landmarks(model_config(section, _architecture(section)))


def _with_landmarks(model: ModelConfig) -> ModelConfig:
    inserted = model.pattern.inserted_tokens
    if inserted is not None and inserted.token == model.vocab_size + 1:
        model = model.replace(vocab_size=model.vocab_size + 2)  # [PAD] and <landmark> are added
    return model


def _architecture(section: ModelSection) -> ModelConfig:
    """Returns the config of a local checkpoint, or the preset of a known hub checkpoint."""
    if section.preset is not None:
        return preset(section.preset)
    if section.path is None:
        raise InputError(
            "model.path=null: name a checkpoint (--model.path=smollm2-135m-instruct), or an"
            " architecture (--model.preset=llama3-8b)"
        )
    if _is_local(section.path):
        return checkpoints.load_config(section.path)
    if (recipe := _recipe_of(section.path)) is not None:
        return model_of(recipe)
    if section.path not in HUB:
        raise InputError(
            f"model.path={section.path} is not on this machine, and nothing is downloaded here;"
            " name its architecture: --model.path=null --model.preset=llama2-7b"
        )
    return preset(HUB[section.path])


def _is_local(path: str) -> bool:
    return path == SMOLLM2 or to_path(path).exists()


def _local_encoder(encoder: str) -> str:
    """Returns `encoder` if it is a preset or a local path, else a preset of its architecture."""
    if encoder in PRESETS or _is_local(encoder):
        return encoder
    if (recipe := _recipe_of(encoder)) is not None and recipe.model.preset is not None:
        return recipe.model.preset
    return HUB.get(encoder, encoder)


def _recipe_of(path: str) -> TrainConfig | None:
    """Returns the recipe whose run writes the folder `path`, since recipes can build on others."""
    name = config_lib.recipe_of(path)
    return name and config_lib.parse(TrainConfig, ["--config", f"lcjax:{name}"])


def check_rules(config: TrainConfig) -> None:
    """Raises an InputError if a rule of `train` matches no parameter, or LoRA fits no matrix.

    It needs shapes only, and checks nothing if they are unknown before loading (adapters of other
    libraries, unknown checkpoints of the hub). Loading checks the parameters again.
    """
    try:
        _without_adapters(config)
    except InputError:
        return
    shapes = cost.parameter_shapes(model_of(config))
    trained = filter(trainable(shapes, config.train.rules()), shapes)
    trainable(trained, [rate.rule for rate in config.train.rates], "train.rates")
