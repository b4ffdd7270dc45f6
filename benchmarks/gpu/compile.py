"""Compiles the GPU kernels on a machine without a GPU, and prints the resources that they use.

    pip install "jax-cuda12-plugin[with-cuda]" jax-cuda12-pjrt     # or cuda13; jax's own version
    python -m benchmarks.gpu.compile [--update | --check | --seconds] [--all] [--only "d_keys h200"]
    python -m benchmarks.gpu.compile --layers

One row per kernel, GPU, head size, dtype and kind of call: registers per thread, spilled bytes, the
number of times that the assembler reports serialised wgmma, shared memory, and tensor core
instructions in the program text (wgmma on Hopper, else mma).

Names of Mosaic GPU kernels begin with `mosaic`. Their registers are those with which threads start,
before the compute warpgroups take over registers of the one that copies.

`--update` writes the rows to compile.json. `--check` compares them with it: no spills, not more
registers, shared memory and serialised wgmma than there, and tensor cores in use. (jax 0.11.2 and
0.12.0.1 differ by a few registers; the file has values that pass with both.)

`--seconds` compiles like a program that uses the kernel, without the dumps from which rows are read
(they double the time), and prints the seconds of lowering and compiling. These include what a
traced table needs in addition to the kernel.

`--layers` prints the number of kernels that XLA makes in addition to those of attention, in a
decoding step of 1, 2 and 4 layers over a cache of 16,384 keys: for 2 queries ("few", keys split
into 16 parts) and for 1 query ("one", 64 parts). Kernels of the block table occur once for all
layers; each layer merges its parts.

Nothing runs on a GPU; `benchmarks.gpu.machine_code` predicts speeds from the machine code.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
from jax.experimental import topologies

from pallas_kernels import causal, everything, prefix, window
from pallas_kernels.backends.mosaic_gpu import attention as _mosaic_gpu
from pallas_kernels.backends.triton import attention as _triton
from pallas_kernels.backends.triton import delta_rule as _triton_delta_rule
from pallas_kernels.backends.triton import grouped as _triton_grouped
from pallas_kernels.backends.triton import landmark as _triton_landmark
from pallas_kernels.biases import Alibi
from pallas_kernels.dispatch import Operands, Spec
from pallas_kernels.key_bits import num_words
from pallas_kernels.landmark import older_spec

HERE = Path(__file__).resolve().parent
TABLE = HERE / "compile.json"
SCRATCH = tempfile.TemporaryDirectory(prefix="gpu_compile_")
DUMP = Path(SCRATCH.name)
BINARY = DUMP / "kernel.cubin"  # of the kernel compiled last
GPUS = {  # file in targets/: name of the device, architecture for ptxas
    "h200": ("NVIDIA H200", "sm_90a"),
    "a100": ("NVIDIA A100-SXM4-80GB", "sm_80"),
    "l40s": ("NVIDIA L40", "sm_89"),  # the same chip; jax 0.11 and 0.12 have no name for the L40S
}
SINKS = causal() & (window(1000) | prefix(4))
SEGMENTS = "q_segments", "k_segments"
PLACES = "q_index", "k_index", *SEGMENTS
CALLS = {  # batch, queries, keys, query heads, key heads, mask, soft cap, biases, traced operands
    "causal": (1, 4096, 4096, 8, 8, causal(), None, False, ()),
    "grouped": (8, 4095, 4095, 8, 2, causal(), None, False, ()),
    "packed": (2, 4095, 4095, 8, 2, causal(), None, False, SEGMENTS),
    "documents": (2, 4095, 4095, 8, 2, SINKS, None, False, PLACES),
    "everything": (2, 4095, 4095, 8, 2, SINKS, 30.0, True, PLACES),
    "capped": (2, 4095, 4095, 8, 2, SINKS, 30.0, False, PLACES),
    "chosen": (1, 4096, 131_072, 32, 8, everything(), None, False, ("key_bits",)),
    "few": (2, 2, 16384, 32, 8, causal(), None, False, PLACES),
    "one": (1, 1, 16384, 32, 4, causal(), None, False, PLACES),
}
LANDMARKS = {  # batch, tokens, tokens of a block, query heads, key heads, traced places
    "landmark": (1, 4096, 64, 8, 8, False),
    "landmark_documents": (2, 4095, 51, 8, 2, True),
}
DELTA_RULE = 1, 4096, 32  # rows, tokens and heads of the call "delta_rule"
EXPERTS = 16_384, 32, 128  # rows, matrices and rows of a block of the call "experts"
EXPERT_KERNELS = "products", "transposed", "sums"
KERNELS = ("forward", "d_queries", "d_keys")
# First word of a row's name: the kernel's module, and its name in the program text.
MODULES = {
    "": (_triton, "lcjax_{}"),
    "mosaic": (_mosaic_gpu, "flash_{}_mosaic_gpu_kernel"),
}
LANDMARK = _triton_landmark, "lcjax_landmark_{}"
# GPU, head size, dtype and call; calls of few queries have a forward pass only.
ROWS = [("h200", 64, "bfloat16", "causal"), ("h200", 128, "bfloat16", "causal")]
ROWS += [("a100", 128, "bfloat16", "causal")]
ROWS += [(gpu, size, "bfloat16", "landmark") for gpu in ("h200", "a100") for size in (64, 128)]
DELTA_RULES = [("h200", 128, "bfloat16"), ("a100", 128, "bfloat16")]
DELTA_RULE_OTHERS = [("l40s", 128, "bfloat16")]
DELTA_RULE_OTHERS += [(gpu, 256, "bfloat16") for gpu in GPUS]
DELTA_RULE_OTHERS += [(gpu, 64, "float32") for gpu in GPUS]
# The size of matrices is that of gpt-oss.
EXPERT_ROWS = [("h200", 2880, "bfloat16"), ("a100", 2880, "bfloat16")]
EXPERT_OTHERS = [("l40s", 2880, "bfloat16"), *((gpu, 2880, "float32") for gpu in GPUS)]
MOSAIC = [("h200", size, "bfloat16", x) for size in (64, 128) for x in ("causal", "documents")]
MOSAIC += [("h200", 64, "bfloat16", "packed"), ("h200", 128, "bfloat16", "grouped")]
OTHERS = [  # run by --all
    *((gpu, 256, "bfloat16", "causal") for gpu in GPUS),
    ("a100", 64, "bfloat16", "causal"),
    *((gpu, 128, "bfloat16", "documents") for gpu in ("h200", "a100")),
    *((gpu, 256, "bfloat16", "documents") for gpu in ("h200", "a100", "l40s")),
    *((gpu, size, "bfloat16", "documents") for gpu in ("h200", "a100") for size in (64, 80)),
    *((gpu, 64, "float32", "documents") for gpu in GPUS),
    *((gpu, size, "bfloat16", "few") for size in (128, 256) for gpu in GPUS),
    *((gpu, 128, "bfloat16", "everything") for gpu in GPUS),
    *((gpu, size, "bfloat16", "chosen") for size in (64, 128) for gpu in GPUS),
    *((*row, "landmark_documents") for *row, call in ROWS if call == "landmark"),
]
MOSAIC_OTHERS = [("h200", size, "bfloat16", "documents") for size in (32, 48, 80, 96, 112)]
MOSAIC_OTHERS += [("h200", size, "bfloat16", "capped") for size in (64, 80, 128)]
MOSAIC_OTHERS += [("h200", 128, "float16", "capped")]


def wheels() -> list[Path]:
    """Returns folders that may have bin/: of wheels for CUDA 12 or 13, or an installed CUDA."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(x) for x in spec.submodule_search_locations] if spec else []
    folders = [root / name for root in roots for name in ("cuda_nvcc", "cu13")]
    return [*folders, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]


def toolkit() -> Path | None:
    """Returns the folder with bin/ptxas and libdevice; None if it is missing."""
    return next((x for x in wheels() if (x / "bin" / "ptxas").exists()), None)


def prepare(xla: bool = True, mosaic: bool = True):
    """Sets which compilers dump their output; call it before JAX starts a backend.

    `resources` reads the dumps of both; the emulator of the tests reads those of Mosaic GPU.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    flags = ["--xla_gpu_autotune_level=0"]
    if (folder := toolkit()) is not None:
        flags += [f"--xla_gpu_cuda_data_dir={folder}"]
        os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"  # Mosaic GPU's ptxas
    if xla:
        flags += [f"--xla_dump_to={DUMP}", "--xla_dump_emitter_re=.*"]
    if mosaic:
        os.environ["LLVM_DISABLE_SYMBOLIZATION"] = "1"  # of a warning's stack: saves a second each
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(DUMP)  # it warns if nvdisasm is missing
    os.environ["XLA_FLAGS"] = " ".join(flags)


def described(gpu: str):
    """Returns a context in which programs are traced for that GPU, as an abstract device."""
    device = jax.sharding.AbstractDevice(device_kind=GPUS[gpu][0], platform="gpu", num_cores=None)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def arrays_of(gpu: str, dtype: str):
    """Returns a function of sizes that describes an array on that GPU."""
    target = (HERE / "targets" / f"{gpu}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def array(*shape, kind=dtype):
        return jax.ShapeDtypeStruct(shape, kind, sharding=place)

    return array


def inputs(gpu: str, size: int, dtype: str, call: str):
    """Returns (q, k, v, out, lse), operands and spec of a call."""
    array = arrays_of(gpu, dtype)
    if call in LANDMARKS:
        b, t, block, n, heads, traced = LANDMARKS[call]
        count = t // block
        q, k = array(b, t, n, size), array(b, count * block, heads, size)
        places = [array(b, x, kind="int32") if traced else None for x in (t, count, t, count)]
        saved = q, k, k, q, array(b, t, n, kind="float32")
        return saved, Operands(*places), older_spec(block, size**-0.5)
    b, t, s, n, heads, mask, cap, biased, traced = CALLS[call]
    shapes = dict.fromkeys(("q_index", "q_segments"), (t,)) | {"key_bits": (t, num_words(s))}
    kinds = {"key_bits": "uint32"}
    places = {x: array(b, *shapes.get(x, (s,)), kind=kinds.get(x, "int32")) for x in traced}
    bias = Alibi(array(n, kind="float32")) if biased else None
    q, k = array(b, t, n, size), array(b, s, heads, size)
    return (
        (q, k, k, q, array(b, t, n, kind="float32")),
        Operands(bias=bias, **places),
        Spec(mask, size**-0.5, cap),
    )


def module_of(kernel: str, call: str):
    """Returns a kernel's module, the last word of its name, and its name in the program text."""
    *word, kernel = kernel.split()
    if call == "delta_rule":
        return _triton_delta_rule, kernel, f"lcjax_delta_rule_{kernel}"
    if call == "experts":
        return _triton_grouped, kernel, f"lcjax_grouped_{kernel.replace('transposed', 'products')}"
    module, entry = LANDMARK if call in LANDMARKS else MODULES[" ".join(word)]
    return module, kernel, entry.format(kernel)


def traced(kernel: str, gpu: str, size: int, dtype: str, call: str):
    """Traces one kernel with jax.jit; lower and compile it in the same `described` context."""
    module, kernel, _ = module_of(kernel, call)
    if call == "delta_rule":
        return traced_delta_rule(module, kernel, gpu, size, dtype)
    if call == "experts":
        return traced_grouped(module, kernel, gpu, size, dtype)
    (q, k, v, out, lse), operands, spec = inputs(gpu, size, dtype, call)
    reason = module.unsupported(q, k, v, operands, spec)
    assert reason is None, reason
    if kernel == "forward":
        return jax.jit(lambda *x: module.forward(*x, spec)).trace(q, k, v, operands)

    def backward(*x):
        dq, dk, dv, *d_bias = module.backward(*x, spec)
        return (dq, *d_bias) if kernel == "d_queries" else (dk, dv)

    return jax.jit(backward).trace(q, k, v, out, lse, out, lse, operands)


def traced_delta_rule(module, direction: str, gpu: str, size: int, dtype: str):
    """Traces a pass of the gated delta rule with heads of `size` channels."""
    array, (batch, tokens, heads) = arrays_of(gpu, dtype), DELTA_RULE
    x, gate = array(batch, tokens, heads, size), array(batch, tokens, heads, kind="float32")
    state, groups = (batch, heads, size, size), -(-tokens // module.GROUP)
    first, states = (
        array(*shape, kind="float32") for shape in (state, (*state[:2], groups, *state[2:]))
    )
    call = x, x, x, gate, gate
    reason = module.unsupported(*call[:4])
    assert reason is None, reason
    if direction == "forward":
        return jax.jit(lambda *x: module.forward(*x, keep_states=True)).trace(*call, first)
    return jax.jit(lambda *x: module.backward(*x)).trace(*call, states, x, first)


def traced_grouped(module, kernel: str, gpu: str, size: int, dtype: str):
    """Traces products of groups of rows, with matrices of `size` rows and columns."""
    array, (rows, count, block) = arrays_of(gpu, dtype), EXPERTS
    x, w = array(rows, size), array(count, size, size)
    reason = module.unsupported(x, w, block)
    assert reason is None, reason
    if kernel == "sums":
        sizes = array(count, kind="int32")
        return jax.jit(lambda *x: module.sums(*x, block=block)).trace(x, x, sizes)
    options = {"block": block, "transpose": kernel == "transposed"}
    owners = array(rows // block, kind="int32")
    return jax.jit(lambda *x: module.products(*x, **options)).trace(x, w, owners)


def compile_one(kernel: str, gpu: str, size: int, dtype: str, call: str) -> dict:
    """Compiles one kernel and returns its `resources`."""
    for file in DUMP.iterdir():
        file.unlink()
    with described(gpu):
        traced(kernel, gpu, size, dtype, call).lower(lowering_platforms=("cuda",)).compile()
    return resources(module_of(kernel, call)[2], GPUS[gpu][1])


def seconds(kernel: str, gpu: str, size: int, dtype: str, call: str) -> dict:
    """Returns the time of lowering and compiling: wall clock, and CPU time of all cores."""
    with described(gpu):
        program = traced(kernel, gpu, size, dtype, call)
        started = time.perf_counter(), sum(os.times()[:4])  # children too: the assembler is one
        program.lower(lowering_platforms=("cuda",)).compile()
        times = time.perf_counter() - started[0], sum(os.times()[:4]) - started[1]
    return {name: f"{x:.1f} s" for name, x in zip(("clock", "cores"), times, strict=True)}


def fusions(layers: int, size: int, call: str) -> int:
    """Returns the number of kernels besides attention's in a decoding step of `layers` layers."""
    (q, k, *_), operands, spec = inputs("h200", size, "bfloat16", call)
    b, s, heads, size = k.shape
    cache = jax.ShapeDtypeStruct((b, heads, s, size), k.dtype, sharding=k.sharding)

    @jax.jit
    def attend(q, keys, values, operands):
        return _triton.forward(q, keys.swapaxes(1, 2), values.swapaxes(1, 2), operands, spec)[0]

    def step(q, caches, operands):
        for keys, values in caches:
            q = attend(q, keys, values, operands)
        return q

    with described("h200"):
        program = jax.jit(step).trace(q, [(cache, cache)] * layers, operands)
        text = program.lower(lowering_platforms=("cuda",)).compile().as_text()
    return len(re.findall(r"^ +(?:ROOT )?%\S+ = .*? fusion\(", text, re.M))


def resources(name: str, architecture: str) -> dict:
    """Returns the resources of the dumped kernel with that name."""
    file = next(x for x in DUMP.glob("*.ptx") if f".entry {name}(" in x.read_text())
    text = file.read_text()
    command = ["ptxas", "-v", f"-arch={architecture}", str(file), "-o", str(BINARY)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:  # such as a PTX version that this ptxas does not support
        raise RuntimeError(result.stderr)
    log = result.stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "serialised": log.count("wgmma.mma_async instructions are serialized"),
        "shared": shared_memory(name, file),
        "wgmma": text.count("wgmma.mma_async"),
        "mma": len(re.findall(r"\bmma\.sync", text)),
    }


def shared_memory(name: str, program: Path) -> int:
    """Returns a launch's bytes of shared memory, from the dumps of XLA (Triton) or Mosaic GPU."""
    passes = program.with_suffix(".mlir-passes.log")
    if passes.exists():
        return int(re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes.read_text())[-1])
    launches = "".join(x.read_text() for x in DUMP.glob("*thunk_sequence.txt"))
    return int(re.search(rf"{name} grid.*shared_memory: (\d+)", launches)[1])


def faults(name: str, found: dict, known: dict | None) -> list[str]:
    """Returns a message for each value that is wrong, or worse than in the table."""
    if known is None:
        return [f"{name}: not in {TABLE.name}; run with --update"]
    found_faults = [f"{name}: {found['spilled']} bytes spilled"] if found["spilled"] else []
    for what, slack in (("registers", 8), ("shared", 0), ("serialised", 0)):
        if found[what] > known[what] + slack:
            found_faults.append(f"{name}: {found[what]} {what}, the table has {known[what]}")
    if found["wgmma"] < min(known["wgmma"], 1) or found["wgmma"] + found["mma"] == 0:
        found_faults.append(f"{name}: products without tensor cores, or without wgmma")
    return found_faults


def rows(every: bool):
    """Yields kernel, GPU, head size, dtype and call of every row; `every`: also of OTHERS."""
    for row in ROWS + (OTHERS if every else []):
        yield from ((kernel, *row) for kernel in KERNELS[: 1 if row[-1] == "few" else 3])
    for row in DELTA_RULES + (DELTA_RULE_OTHERS if every else []):
        yield from ((kernel, *row, "delta_rule") for kernel in ("forward", "backward"))
    for row in EXPERT_ROWS + (EXPERT_OTHERS if every else []):
        yield from ((kernel, *row, "experts") for kernel in EXPERT_KERNELS)
    for row in MOSAIC + (MOSAIC_OTHERS if every else []):
        yield from ((f"mosaic {kernel}", *row) for kernel in KERNELS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    aim = parser.add_mutually_exclusive_group()
    aim.add_argument("--update", action="store_true", help="write the table")
    aim.add_argument("--check", action="store_true", help="fail where it is worse than the table")
    aim.add_argument("--seconds", action="store_true", help="how long compiling takes, that alone")
    aim.add_argument("--layers", action="store_true", help="kernels of a step of several layers")
    parser.add_argument("--all", action="store_true", help="more calls, GPUs and dtypes")
    parser.add_argument("--only", default="", help="words that a row's name must have")
    args = parser.parse_args()
    dumps = not (args.seconds or args.layers)
    prepare(xla=dumps, mosaic=dumps)
    if args.layers:
        for call, size in (("few", 128), ("one", 64)):
            for layers in (1, 2, 4):
                count = fusions(layers, size, call)
                print(f"{call}, layers {layers}: {count} kernels beside those of attention")
        return 0
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    worse = []
    for row in rows(args.all):
        name = " ".join(map(str, row))
        if not set(args.only.split()) <= set(name.split()):
            continue
        result = seconds(*row) if args.seconds else compile_one(*row)
        print(f"{name:44}", *(f"{k} {v:<6}" for k, v in result.items()), flush=True)
        worse += faults(name, result, table.get(name)) if args.check else []
        if args.update:
            table[name] = result
            TABLE.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")
    SCRATCH.cleanup()
    print("\n".join(worse))
    return len(worse)


if __name__ == "__main__":
    sys.exit(main())
