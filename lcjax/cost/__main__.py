"""`python -m lcjax.cost --config X --length 131072 --topology v5e:16x16`: memory, speed, hours.

It estimates the training that a config describes; nothing is loaded or compiled. Its own options
are `--topology` (`v5p:2x2x2*4`: four slices), `--length` (default: data.length) and `--mfu`
(default: 0.4); all other keys are those of train.py. Without a config, a model is enough, as in
`--model.preset=llama3-8b --length 131072 --topology h200:8`: the default of train.batch_size is
then rounded up to equally many rows on each device.

With `--longest` it prints the longest texts that fit instead, for every word of `model.remat`, with
and without the optimizer's state in host memory.

`python -m lcjax.cost --compiled --config X --length 8192 --topology v5e:2x2` compiles programs for
these devices, which need not be present: prefill, a decoding step and a training step; with a cache
policy (`model.cache`), which training ignores, also the cut at the end of a prompt.
It compares the roofline bound of each with the compiler's numbers. Without `--topology` it compiles
for the devices of this machine. `--programs prefill,decode` selects programs. Each reads
`train.batch_size` rows of `--length` tokens. The weights of prefill and decode are in
`model.param_dtype`.
"""

import sys
from collections.abc import Callable, Sequence

import jax

from lcjax import config as config_lib
from lcjax.cost import hlo, roofline
from lcjax.cost.chips import Topology, local_chip
from lcjax.cost.compilers import devices
from lcjax.cost.program import ProgramCost, Traffic, program_cost
from lcjax.cost.resources import parameter_shapes
from lcjax.errors import InputError, check_one_of
from lcjax.generation import session
from lcjax.models import ModelConfig
from lcjax.models.weight_storage import num_weights
from lcjax.parallel.sharding import AXES, make_mesh, mesh_sizes, slices_along
from lcjax.progress import compiling
from lcjax.training import TrainConfig, batches, compile_only, estimate

COMPILED = "--compiled"
FLAGS = ("compiled", "longest")
PROGRAMS = ("prefill", "cut", "decode", "train")
PREFILL = 4096  # tokens of a prompt that accelerators read at once
Columns = dict[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if all fits, 1 if something does not, and 2 for wrong input."""
    words, results = list(sys.argv[1:] if argv is None else argv), []
    is_compiled = COMPILED in words
    if {"-h", "--help"} & {*words}:  # also if options are missing
        config_lib.parse(TrainConfig, ["--help"])
    names = "length", "topology", "programs", *(() if is_compiled else ("mfu",))
    try:
        positional, options, keys = config_lib.split_options(words, names, FLAGS)
        words = [*positional, *keys]
        is_local = is_compiled and not options["topology"]  # the devices of this machine
        topology = None if is_local else Topology.parse(options["topology"] or "")
        programs = [name for name in (options.get("programs") or "").split(",") if name]
        if programs and not is_compiled:
            raise InputError("--programs names what --compiled compiles; add it, or leave both out")
        if options["longest"] is not None and is_compiled:
            raise InputError("--longest estimates, and --compiled compiles; leave one out")
        for name in programs:
            check_one_of("--programs", name, PROGRAMS)
        mfu = _mfu(options.get("mfu") or str(estimate.MFU))
        if options["length"]:
            words.append(f"--data.length={options['length']}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if is_compiled and not is_local:  # this machine's devices must not be opened
        jax.config.update("jax_platforms", "cpu")

    rows = ("--config=", "--train=", "--train.batch_size=")
    names_rows = any(word.startswith(rows) for word in words)

    def run(config: TrainConfig) -> None:
        if not names_rows:
            count = jax.device_count() if topology is None else topology.devices
            config = batches.with_whole_batch(config, mesh_sizes(config.mesh, count).shape)
        if is_compiled:
            fits = report(config, topology, programs)
        elif options["longest"] is not None:
            fits = estimate.longest_report(config, topology, mfu)
        else:
            fits = estimate.report(config, topology, mfu)
        results.append(fits)

    code = config_lib.main(TrainConfig, run, words)
    return code or int(not all(results))


def _mfu(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise InputError(f"--mfu={text} must be a share of the peak above 0, at most 1, as 0.4")
    return value


def report(config: TrainConfig, topology: Topology | None, programs: Sequence[str]) -> bool:
    """Compiles programs and prints a table of costs; returns whether all fit into a device."""
    estimate.check_language_model(config)
    model = estimate.model_of(config)
    if topology is None and config.model.dtype is None and jax.default_backend() == "cpu":
        model = model.replace(dtype="float32")
    mesh = make_mesh(config.mesh, None if topology is None else devices(topology))
    chip = local_chip(model.dtype) if topology is None else topology.chip
    rows, length = config.train.batch_size, batches.row_length(config, model)
    columns, fits = {}, True
    shapes = parameter_shapes(model)
    num_params = sum(num_weights(path, leaf.shape) for path, leaf in shapes.items())
    for name in programs or _programs_of(model):
        lower, work, title = _program(name, config, model, mesh)
        with compiling(f"the {title}", num_params, mesh.size):
            cost = program_cost(lower(), chip, mesh)
        columns[title] = column(cost, work)
        fits = fits and cost.fits
    sizes = " ".join(f"{axis}={mesh.shape[axis]}" for axis in AXES if mesh.shape[axis] > 1)
    print(
        f"{topology or chip.name}: {mesh.size} devices{sizes and ', '}{sizes};"
        f" {rows} rows of {length:,} tokens; per device, in one run. {chip.name}:"
        f" {chip.peak / 1e12:,.3g} TFLOP/s, {chip.bandwidth / 1e9:,.3g} GB/s\n"
    )
    print(table(columns))
    if "training step" in columns:
        notes = [*estimate.storage_notes(model), *estimate.replication_notes(model, mesh)]
        print("".join(f"\n{line}" for line in notes))
    return fits


def _programs_of(model: ModelConfig) -> list[str]:
    """Returns the programs that run a model."""
    cuts = model.evicts and model.cache.chunk is None
    return [name for name in PROGRAMS if name != "cut" or cuts]


def _program(
    name: str, config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh
) -> tuple[Callable[[], jax.stages.Lowered], roofline.Work, str]:
    """Returns a function that lowers a program, the work of its bound, and its column's title."""
    rows, length = config.train.batch_size, batches.row_length(config, model)
    if name == "train":
        estimated = estimate.training_memory(config, model, mesh)
        work = roofline.training_work(
            *(model, compile_only.step_flops(config, model), estimated, mesh),
            accumulation=config.train.accumulation,
            received=estimate.received_from_slices(config, model, mesh.shape, slices_along(mesh)),
        )
        return lambda: compile_only.lower(config, model, mesh), work, "training step"
    batches.check_rows(config, dict(mesh.shape))
    plain = model.replace(lora=None)  # adapters are merged for inference
    tokens = min(session.chunk_of_cache(plain, PREFILL), length)
    if name == "cut":
        if "cut" not in _programs_of(plain):
            raise InputError(
                "--programs=cut needs a cache policy that cuts at the end of a prompt: set"
                " model.cache without chunk"
            )
        work = roofline.cut_work(plain, rows, length, mesh)
        return lambda: session.lower_cut(plain, mesh, rows, length, tokens), work, "cut"
    tokens = 1 if name == "decode" else tokens
    work = roofline.inference_work(plain, rows, length, tokens, mesh)
    title = "decoding step" if tokens == 1 else f"prefill of {tokens:,} tokens"
    return lambda: session.lower_read(plain, mesh, rows, length, tokens), work, title


def column(cost: ProgramCost, work: roofline.Work) -> Columns:
    """Returns the cells of the column of one program, by the name of their row."""
    chip, (seconds, binds) = cost.chip, work.bound(cost.chip)
    cells = {
        "TFLOP, model": f"{work.flops / 1e12:,.3g}",
        "GB, least": f"{work.bytes / 1e9:,.3g}",
        "roofline bound, ms": f"{1e3 * seconds:,.3g} ({binds})",
    }
    if cost.out_of_memory:
        return cells | {"peak, GB": _peak(cost)}
    module = hlo.Module(cost.text)
    seconds, binds = roofline.Work(cost.flops, cost.accessed).bound(chip)
    cycles = hlo.estimated_cycles(module)
    milliseconds = f" = {1e3 * cycles / chip.clock:,.3g} ms" if chip.clock else ""
    optimal = cost.optimal_seconds
    cache = {}
    if hlo.has_argument(module, session.CACHED_LAYERS):
        copies = hlo.copies(module, session.CACHED_LAYERS)
        cache = {
            "copies of the cache": f"{copies.count:,} ({copies.bytes / 1e9:,.3g} GB)",
            "cache through VMEM, GB": f"{copies.staged / 1e9:,.3g}",
        }
    between, ms = cost.between, {}
    if chip.link and cost.within:
        ms["collectives, ms"] = f"{1e3 * cost.within / chip.links:,.3g}"
    if between.count and chip.network:
        ms["between slices, ms"] = f"{1e3 * between.bytes / chip.network:,.3g}"
    return cells | {
        "TFLOP, compiler": f"{cost.flops / 1e12:,.3g}",
        "GB, compiler": f"{cost.accessed / 1e9:,.3g}",
        "bound of these, ms": f"{1e3 * seconds:,.3g} ({binds})",
        "kernels": _counts(hlo.kernels(module)),
        **({} if chip.dimensions else {"launches": f"{hlo.launches(module):,}"}),
        "compiler's time, ms": "none" if optimal is None else f"{1e3 * optimal:,.3g}",
        "compiler's cycles, M": f"{cycles / 1e6:,.3g}{milliseconds}" if cycles else "none",
        "arguments, GB": f"{cost.arguments / 1e9:,.3g}",
        "outputs, GB (in place)": f"{cost.outputs / 1e9:,.3g} ({cost.in_place / 1e9:,.3g})",
        "temporaries, GB": f"{cost.temporaries / 1e9:,.3g}",
        **({"host memory, GB": f"{cost.host / 1e9:,.3g}"} if cost.host else {}),
        **(
            {"copies with the host (overlapped)": _traffic(cost.host_copies)}
            if cost.host_copies.count
            else {}
        ),
        "peak, GB": _peak(cost),
        **cache,
        "float32 products": _counts(hlo.float32_products(module)),
        "collectives (overlapped)": ", ".join(
            f"{kind} {_traffic(x)}" for kind, x in cost.traffic.items()
        )
        or "0",
        **({"between slices (overlapped)": _traffic(between)} if between.count else {}),
        **ms,
    }


def _traffic(traffic: Traffic) -> str:
    return f"{traffic.count:,} ({traffic.overlapped:,}) {traffic.bytes / 1e9:,.3g} GB"


def _peak(cost: ProgramCost) -> str:
    """Returns the peak memory, the usable memory of the chip, and whether the program fits."""
    sizes = f"{cost.peak_memory / 1e9:,.3g} of {cost.chip.usable / 1e9:,.3g}"
    return f"{sizes}: {'fits' if cost.fits else 'does not fit'}"


def _counts(counts: dict[str, int]) -> str:
    """Returns the total of the counts, and the two most frequent names."""
    names = ", ".join(name for name, _ in counts.most_common(2))
    return f"{counts.total():,} ({names})" if counts else "0"


def table(columns: dict[str, Columns]) -> str:
    """Returns a Markdown table of `columns` by title, with a row for each figure."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [["", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[name, *(column.get(name, "") for column in columns.values())] for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
