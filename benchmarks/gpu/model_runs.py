"""The cases of `model.py`, and their measurement in its child process."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .. import reading, training
from . import records

OURS = "lcjax"  # the side whose attention lcjax chooses
JAX_NN = "jax.nn "  # prefix of sides that call `jax.nn.dot_product_attention`
FULL, SHARED_LLM = "full", "shared_llm"  # sides of reading: full attention, and memories
CEPE, PROJECTED = "cepe", "cepe projected"  # store the encoder's states, or keys and values
STEP_TOKENS = 32_768  # tokens of an update, unless a text is longer or memory does not suffice
NEW_TOKENS = 64  # tokens that decoding adds
TIMED, ENOUGH = 7, 30.0  # timed runs, and seconds after which no further run begins
OFFLOAD, DEVICE = "offload", "device"  # where updates of the longest texts keep activations
LONGEST_SECONDS = 20.0  # that a timed update of a long text is predicted to take, at most
HOST_SHARE = 0.8  # of the host's memory that offloaded arrays may take
LONGEST = {  # the configs of these updates, by model
    "1.1b": ("--model.preset=tinyllama-1.1b", "--model.dtype=bfloat16", "--data.path=none"),
    "8b-qlora": ("--config", "lcjax:llama3_8b_512k_qlora"),
    "tiny": ("--model.preset=tiny", "--data.path=none"),
}
KEPT = {
    OFFLOAD: ("--model.remat=offload", "--train.offload=optimizer"),
    DEVICE: ("--model.remat=full",),
}
USABLE = 0.95  # largest share of the allocator's memory that the compiler's plan may take
# The packages that lcjax needs for these cases, by import name.
NEEDED = {name: name for name in ("draccus", "flax", "jaxtyping", "mergedeep", "optax")}
NEEDED |= {"upath": "universal_pathlib", "yaml": "pyyaml"}
NEEDED |= {"pathlib_abc": "pathlib_abc", "typing_inspect": "typing-inspect"}
MODULES = (
    "lcjax.cost",
    "lcjax.generation.language_model",
    "lcjax.memory",
    "lcjax.training.state",
    "lcjax.training.step",
)


@dataclass(frozen=True)
class Case:
    """One measurement: its kind, a model, tokens of a text, and the attention or memory."""

    kind: str  # train, decode, read or longest
    model: str  # of `shape`, or of LONGEST
    tokens: int  # 0: as many as fit
    side: str  # OURS or an attention for `forced`; a memory or FULL; or a key of KEPT

    @property
    def name(self) -> str:
        if not self.tokens:
            return f"{self.kind} {self.model} {self.side}"
        k = f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)
        return f"{self.kind} {self.model} {k} {self.side}"


def cases(tiny: bool = False) -> list[Case]:
    """Returns all cases, the most informative ones first; `tiny` ones are for a CPU."""
    if tiny:
        return [
            *(Case("train", "tiny", 64, side) for side in (OURS, f"{JAX_NN}xla")),
            *(Case("decode", "tiny", 64, side) for side in (OURS, f"{JAX_NN}xla")),
            *(Case("read", "tiny", 256, side) for side in (FULL, CEPE, SHARED_LLM)),
            *(Case("longest", "tiny", 0, side) for side in KEPT),
        ]
    train, decode = (OURS, f"{JAX_NN}cudnn"), (OURS, f"{JAX_NN}xla")

    def both(model: str, tokens: int) -> list[Case]:
        return [
            *(Case("train", model, tokens, side) for side in train),
            *(Case("decode", model, tokens, side) for side in decode),
        ]

    k = 1024
    return [
        *both("1.1b", 16 * k),
        *(Case("read", "1.1b", 128 * k, side) for side in (CEPE, FULL, SHARED_LLM)),
        *both("1.1b", 64 * k),
        *(Case("longest", model, 0, side) for model in ("1.1b", "8b-qlora") for side in KEPT),
        # Its backward pass does not compute attention again, unlike that of jax.nn.
        Case("train", "1.1b", 16 * k, "cudnn"),
        *both("135m", 16 * k),
        *both("1.1b", 4 * k),
        *(Case("decode", "1.1b", n * k, f"{JAX_NN}cudnn") for n in (16, 64)),
        Case("train", "1.1b", 4 * k, "xla"),
        Case("decode", "1.1b", 16 * k, "xla"),
        *(Case("read", "7b", 128 * k, side) for side in (CEPE, SHARED_LLM, FULL)),
        Case("read", "1.1b", 128 * k, PROJECTED),
        *both("135m", 64 * k),
        *both("135m", 4 * k),
        Case("train", "1.1b", 16 * k, "xla"),
        Case("train", "1.1b", 64 * k, "cudnn"),
    ]


def shape(model: str):
    """Returns the model config for a model's name in the cases."""
    from lcjax.models import preset

    if model == "tiny":
        return preset("tiny").replace(num_layers=1)
    names = {"135m": "smollm2-135m", "1.1b": "tinyllama-1.1b", "7b": "llama2-7b"}
    return preset(names[model])


def forced(side: str):
    """Returns a causal attention pattern that is computed by `side` alone.

    `side` is an implementation of `pallas_kernels` or of `jax.nn`. That of `jax.nn` computes
    training and the decoding of single tokens; prompts, which are not compared, use lcjax's own.
    """
    import jax

    from lcjax.attention import Causal
    from lcjax.attention.base import rotate_qk

    @dataclass(frozen=True)
    class Forced(Causal):
        is_position_based = True  # although it replaces `attend`

        def attend(self, q, k, v, metadata):
            in_cache, library = metadata.keys_rotated, side.startswith(JAX_NN)
            if in_cache and library and q.shape[1] > 1:
                return super().attend(q, k, v, metadata)
            if not in_cache:  # one document a row, which cuDNN's causal mask needs
                metadata = metadata.replace(
                    q_index=None, k_index=None, q_segments=None, k_segments=None
                )
            if not library:
                return super().attend(q, k, v, metadata.replace(implementation=side))
            q, k = rotate_qk(q, k, metadata)
            filled = {"key_value_seq_lengths": metadata.q_index[:, -1] + 1} if in_cache else {}
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=not in_cache, **filled,
                implementation=side.removeprefix(JAX_NN),
            )  # fmt: skip

    return Forced()


def about() -> dict:
    """Returns `records.describe`, and the result of the kernels' self-check."""
    from pallas_kernels import dispatch, self_check

    device = records.describe()
    if dispatch.platform() == "cuda":
        checked = self_check.results("bfloat16")  # runs the check if no file has its results
        failures = checked if isinstance(checked, str) else self_check.failures(checked)
        device["self_check"] = failures or self_check.PASSED
    return device


def missing_packages() -> list[str]:
    """Returns the packages that must be installed before anything can be measured."""
    missing = [
        package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None
    ]
    try:
        for module in () if missing else MODULES:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing.append(error.name)
    return missing


def measure(case: Case, begin: Callable[[str], None]) -> dict:
    """Returns the record of a case.

    Args:
      case: what to measure.
      begin: called with a description before each step that may take long.
    """
    run = {"train": _train, "longest": _longest}.get(case.kind, _read)
    record = run(case, begin)
    return record | {"clocks": records.nvidia_smi(*records.CLOCKS)}


def peak_bytes() -> int:
    """Returns the peak bytes in use on the device; for a CPU, the peak of the process."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return stats.get("peak_bytes_in_use", host)


def release() -> None:
    """Frees the arrays and programs of a case, before another one in the same process."""
    import jax

    gc.collect()
    jax.clear_caches()


def _train(case: Case, begin) -> dict:
    """Times updates of all weights in bfloat16, with weights and moments in float32."""
    import jax

    from lcjax import cost
    from lcjax.models.decoder import random_params
    from lcjax.parallel.sharding import Mesh, make_mesh
    from lcjax.training.state import init_state

    mesh, base = make_mesh(Mesh(), jax.devices()[:1]), _config(case, param_dtype="float32")
    for config, rows in _batches(base, case.tokens):
        begin(f"compiling {rows} x {case.tokens} tokens, remat={config.remat}")
        program, optimizer, batch, record = _compiled_update(config, rows, case, mesh)
        if record["plan_gb"] < USABLE * _memory_limit() / 1e9:
            break
    begin("making the weights")
    state = init_state(random_params(config, 0), optimizer, mesh, seed=0, ema=False)
    gc.collect()

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        state, info = program(state, {}, batch)
        jax.block_until_ready((state, info))
        return time.perf_counter() - start

    begin("running")
    run()
    seconds = _repeated(run, begin)
    tokens = rows * case.tokens
    flops = cost.estimate(config, case.tokens).training_flops * tokens
    return (
        record
        | _rates(tokens, seconds)
        | {
            "rows": rows,
            "remat": config.remat,
            "step_flops": flops,
            "mfu": _share(flops / statistics.median(seconds), cost.peak_flops()),
        }
    )


def _longest(case: Case, begin) -> dict:
    """Finds the longest text of which an update fits, and times one of a shorter text."""
    import jax

    from lcjax import config as config_lib
    from lcjax import cost
    from lcjax.parallel.sharding import Mesh, make_mesh
    from lcjax.training import TrainConfig, estimate
    from pallas_kernels import dispatch

    words = (*LONGEST[case.model], *KEPT[case.side], "--train.batch_size=1")
    words += ("--train.accumulation=1", "--mesh.fsdp=1", "--mesh.context=1")
    config = config_lib.parse(TrainConfig, words)
    model, mesh = estimate.model_of(config), make_mesh(Mesh(fsdp=1), jax.devices()[:1])
    is_tiny, platform = case.model == "tiny", dispatch.platform()
    step, most = (64, 512) if is_tiny else (4096, estimate.MOST_TOKENS)
    usable = USABLE * min(_memory_limit(), 1e15)
    host = HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def share(device: float, on_host: float) -> float:
        """Returns how full the memory is: of the device or of its host, which is fuller."""
        return max(device / usable, on_host / host)

    def estimated(tokens: int) -> float:
        memory = estimate.memory_of_length(config, model, mesh, platform, tokens)
        return share(memory.total, memory.host)

    def compiled(tokens: int) -> tuple:
        begin(f"compiling {tokens} tokens")
        return _compiled_step(case, config, model, mesh, tokens)

    tokens, plans, sizes = estimate.longest_text(estimated, 1.0, step, most) or step, {}, {}
    while tokens not in plans and len(plans) < 4:
        plan = compiled(tokens)[-1]
        sizes[tokens] = plan["plan_gb"], plan["host_gb"]
        plans[tokens] = share(1e9 * plan["plan_gb"], 1e9 * plan["host_gb"])
        # Along the line through the last two plans, or with the slope of the estimate
        other = next((n for n in reversed(plans) if n != tokens), None)
        half = tokens // 2 // step * step or tokens + step
        shares, other = (estimated, half) if other is None else (plans.get, other)
        of_token = (shares(tokens) - shares(other)) / (tokens - other)
        free = 1.0 - plans[tokens]
        tokens += int((0.95 if free > 0 else 1.05) * free / of_token) // step * step
        tokens = min(max(tokens, step), most)
    fitting = [tokens for tokens, used in plans.items() if used <= 1.0]
    if not fitting:
        raise MemoryError(f"no text fits; parts of the memory by tokens: {plans}")
    longest = max(fitting)

    def seconds(tokens: int) -> float:
        flops = cost.estimate(model, tokens).training_flops * tokens
        return flops / (0.4 * (cost.peak_flops() or 1e12))

    timed = min(longest, max(step, estimate.longest_text(seconds, LONGEST_SECONDS, step, most)))
    program, inputs, record = compiled(timed)
    begin("making weights of zeros")
    state, frozen, shapes, skipped = inputs
    batch = {
        name: jax.device_put(x, shapes[name].sharding)
        for name, x in training.batch(1, timed, model.vocab_size).items()
    }
    state, frozen, skipped = jax.tree.map(_zeros, (state, frozen, skipped))

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        state, info = program(state, frozen, batch, skipped)
        jax.block_until_ready((state, info))
        assert info["tokens"] == timed, "the text was not read whole"
        return time.perf_counter() - start

    begin("running")
    run()
    times = _repeated(run, begin)
    flops = cost.estimate(model, timed).training_flops * timed
    return (
        record
        | _rates(timed, times)
        | {
            "longest": longest,
            "used": plans[longest],
            "longest_gb": sizes[longest],
            "timed_tokens": timed,
            "rows": 1,
            "remat": model.remat,
            "step_flops": flops,
            "mfu": _share(flops / statistics.median(times), cost.peak_flops()),
        }
    )


def _compiled_step(case: Case, config, model, mesh, tokens: int) -> tuple:
    """Returns the compiled update of a text, its abstract inputs, and fields of the record."""
    from lcjax.training import compile_only
    from pallas_kernels.explanations import record_explanations

    data = dataclasses.replace(config.data, length=tokens)
    config = dataclasses.replace(config, data=data)
    start = time.perf_counter()
    with record_explanations() as explanations:
        lowered = compile_only.lower(config, model, mesh)
    program = lowered.compile()
    plan = program.memory_analysis()
    nbytes = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    record = {
        "compile_s": time.perf_counter() - start,
        "plan_gb": (nbytes - plan.alias_size_in_bytes) / 1e9,
        "host_gb": (plan.host_argument_size_in_bytes + plan.host_temp_size_in_bytes) / 1e9,
        "attention": _implementations(case, explanations),
    }
    return program, compile_only.abstract_inputs(config, model, mesh), record


def _zeros(abstract):
    """Returns zeros on the device, or in the memory of its host, as the sharding says."""
    import jax
    import numpy as np

    is_key = jax.dtypes.issubdtype(abstract.dtype, jax.dtypes.prng_key)
    value = jax.random.key(0) if is_key else np.zeros(abstract.shape, abstract.dtype)
    return jax.device_put(value, abstract.sharding)


def _compiled_update(config, rows: int, case: Case, mesh):
    """Returns the compiled update, its optimizer, a batch, and their fields of the record."""
    import jax

    from lcjax.models.decoder import abstract_params
    from lcjax.parallel.sharding import replicated
    from lcjax.training.state import abstract_state, state_shardings
    from pallas_kernels.explanations import record_explanations

    update, optimizer = training.update(config)
    batch = training.batch(rows, case.tokens, config.vocab_size)
    params = abstract_params(config, mesh)
    state = abstract_state(params, optimizer, mesh, seed=0, ema=False)
    layout = state_shardings(state, mesh), replicated(mesh)
    start = time.perf_counter()
    with record_explanations() as explanations:
        lowered = jax.jit(update, donate_argnums=0, out_shardings=layout).lower(state, {}, batch)
    program = lowered.compile()
    seconds, plan = time.perf_counter() - start, program.memory_analysis()
    nbytes = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    record = {
        "compile_s": seconds,
        "plan_gb": (nbytes - plan.alias_size_in_bytes) / 1e9,
        "attention": _implementations(case, explanations),
    }
    return program, optimizer, batch, record


def _batches(config, length: int) -> Iterator[tuple]:
    """Yields (config, rows), beginning with the most tokens and the least recomputation.

    The first pair is the first one that fits by the estimate of `lcjax.cost`, or else the last one.
    The estimate is for lcjax's attention, so that all sides begin with the same pair.
    """
    from lcjax import cost
    from lcjax.attention import Causal
    from lcjax.checkpoints.build import ModelSection
    from lcjax.parallel.sharding import Mesh

    tokens = STEP_TOKENS if length >= 1024 else 2 * length
    rows, usual = max(1, tokens // length), config.replace(remat=ModelSection().remat)
    choices = [(usual, rows >> n) for n in range(rows.bit_length())]
    choices += [(config.replace(remat=remat), 1) for remat in ("attention", "full")]
    limit, fits = _memory_limit(), False
    for n, (choice, count) in enumerate(choices):
        fits = fits or n + 1 == len(choices)
        if not fits:
            plain = choice.replace(pattern=Causal())
            fits = cost.training_memory(plain, length, count, Mesh(fsdp=1)).total < limit
        if fits:
            yield choice, count


def _read(case: Case, begin) -> dict:
    """Times reading and continuing a text, with all weights and the cache in bfloat16."""
    from lcjax import cost
    from pallas_kernels.explanations import record_explanations

    config, chunk = _config(case, param_dtype=None), None
    if case.side in (CEPE, PROJECTED):
        encoder = {"tiny": "tiny-encoder", "135m": "smollm2-encoder"}
        config = reading.with_cepe(config, encoder.get(case.model, "cepe-encoder"))
        chunk = min(256, config.memory.max_chunk_size)
    elif case.side == SHARED_LLM:
        chunk = 64 if case.model == "tiny" else reading.SHARED_LLM["chunk"]
        config = reading.with_shared_llm(config, chunk=chunk)
    begin("making the weights")
    new = NEW_TOKENS if case.kind == "decode" else reading.NEW_TOKENS
    options = {"chunk": chunk, "projected": case.side == PROJECTED, "new_tokens": new}
    timed = reading.timed_runs(reading.reader(config), case.tokens, **options)
    begin("compiling and running once")
    start = time.perf_counter()
    with record_explanations() as explanations:
        next(timed)
    first, runs = time.perf_counter() - start, []
    begin("running")
    totals = _repeated(lambda: _total(runs, timed, new), begin)
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    record = median | {
        "compile_s": max(0.0, first - statistics.median(totals)),
        "attention": _implementations(case, explanations),
    }
    if case.kind == "read":
        return record | _rates(case.tokens, [reading.reads(run) for run in runs])
    estimate = cost.estimate(config, case.tokens)
    nbytes = _weight_bytes(config, estimate) + estimate.kv_cache_bytes
    seconds = [run["token"] for run in runs]
    return (
        record
        | _rates(1, seconds)
        | {
            "token_bytes": nbytes,
            "bandwidth_share": _share(nbytes / statistics.median(seconds), cost.peak_bandwidth()),
        }
    )


def _total(runs: list[dict], timed: Iterator[dict], new_tokens: int) -> float:
    """Appends one run to `runs`, and returns its seconds."""
    runs.append(next(timed))
    return reading.reads(runs[-1]) + new_tokens * runs[-1]["token"]


def _config(case: Case, param_dtype: str | None):
    """Returns the model config of a case; `param_dtype` None: the dtype of activations."""
    dtype = "float32" if case.model == "tiny" else "bfloat16"
    config = shape(case.model)
    config = config.replace(
        dtype=dtype,
        param_dtype=param_dtype or dtype,
        max_length=max(config.max_length, case.tokens + NEW_TOKENS + 1),
        scan_layers=case.kind == "train",  # as in train.py, and as in `LanguageModel`
    )
    if case.kind == "read" or case.side == OURS:
        return config
    return config.replace(pattern=forced(case.side))


def _repeated(run: Callable[[], float], begin) -> list[float]:
    seconds = []
    while len(seconds) < TIMED and (len(seconds) < 2 or sum(seconds) < ENOUGH):
        begin(f"run {len(seconds) + 1}")
        seconds.append(run())
    return seconds


def _rates(tokens: int, seconds: list[float]) -> dict:
    """Returns tokens per second of the median, the slowest and the fastest run."""
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "range": [tokens / max(seconds), tokens / min(seconds)],
        "seconds": seconds,
    }


def _implementations(case: Case, explanations) -> dict[str, list[str]]:
    """Returns, by implementation of attention, the calls that it computed."""
    calls = {case.side: ["single tokens" if case.kind == "decode" else "all"]}
    calls = calls if case.side.startswith(JAX_NN) else {}
    for explanation in dict.fromkeys(explanations):
        name = explanation.implementation
        reasons = [f"not {x}: {why}" for x, why in explanation.reasons if x != name]
        calls.setdefault(name, []).append("; ".join([explanation.call, *reasons]))
    return calls


def _weight_bytes(config, estimate) -> int:
    """Returns the weight bytes that a token reads: without an embedding that is not the head."""
    size = 0 if config.tie_embeddings else config.vocab_size * config.width
    return estimate.parameter_bytes - size * (estimate.parameter_bytes // estimate.parameters)


def _share(value: float, peak: float | None) -> float | None:
    return value / peak if peak else None


def _memory_limit() -> float:
    """Returns the bytes that the allocator may take; infinite for a CPU."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", math.inf)
