"""Counts instruction bundles of the TPU kernels and of splash attention, without a TPU.

    python benchmarks/tpu_bundles.py [--generations v4 v5e v5p v6e] [--cases causal window ...]
    python benchmarks/tpu_bundles.py --others  # decoding, Landmark attention, gated delta rule
    python benchmarks/tpu_bundles.py --others "gated delta rule" --generations v5e
    python benchmarks/tpu_bundles.py --xla  # estimates of the gated delta rule by XLA

A TPU issues one bundle of instructions per cycle, and libtpu (extra `aot`) can write the schedule
that it compiles. The table has the bundles of the code that runs once per visited pair of blocks,
per 1,024 x 1,024 scores, and the share of the matrix units' slots that they fill. If a kernel has
one version for blocks without a mask and one for other blocks, both are printed. `total` is the sum
over the visited blocks of a head, in millions, with its ratio to that of JAX's splash attention (to
the better one of its two backward passes). Memory stalls are not counted: compare kernels by these
numbers, but do not quote them as times. For kernels without a peer, `--others` prints the bundles
of a step.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
TOKENS, HEADS, BLOCK = 8192, 8, 1024
SIDES = ("ours", "splash", "splash_fused")
DIRECTIONS = ("forward", "backward")
SLOTS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
_LINE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(\w+)?\s*:\s+>*\s*\{(.*)")
_KERNEL = re.compile(r"(\d+-((?:lcjax|splash)_\w+?)(?:\.\d+)?)-\d+-final_bundles\.txt")


@dataclass(frozen=True)
class Case:
    """Causal attention of `TOKENS` tokens."""

    window: int | None = None
    documents: int = 1  # number of documents of equal length, which segments separate
    density: float | None = None  # share of the blocks of a table
    size: int = 128  # of a head

    def blocks(self) -> np.ndarray:
        """Returns bool [blocks, blocks]: the pairs that a random table of this density lists."""
        count = TOKENS // BLOCK
        picked = np.random.default_rng(0).random((count, count)) < (self.density or 1)
        return np.tril(picked | np.eye(count, dtype=bool))

    def pairs(self) -> np.ndarray:
        """Returns bool [tokens, tokens]: the pairs of tokens that are visible."""
        row, column = np.ogrid[:TOKENS, :TOKENS]
        seen = row >= column
        if self.window is not None:
            seen &= row - column < self.window
        if self.density is not None:
            seen &= np.kron(self.blocks(), np.ones((BLOCK, BLOCK), bool))
        return seen


CASES = {
    "causal": Case(),
    "window": Case(window=1024),
    "window of 512": Case(window=512),
    "segments": Case(documents=8),
    "table": Case(density=0.1),
    "heads of 64": Case(size=64),
    "heads of 256": Case(size=256),
}


@dataclass(frozen=True)
class Region:
    """Code between two branches, which runs once for each visited pair of blocks."""

    bundles: int
    mxu: float  # share of the slots of matrix units in use


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--others", nargs="*", choices=OTHERS, help="kernels without a peer")
    parser.add_argument("--xla", action="store_true", help="estimates of the XLA form beside these")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        compile_side(*arguments.worker)
        return
    if arguments.xla:
        print("| chip | gated delta rule by XLA | estimated cycles | bytes |")
        print("|---|---|---|---|")
        for generation in arguments.generations:
            print(xla_rows(generation), flush=True)
        return
    if arguments.others is not None:
        print("| case | chip | kernel | step | bundles |")
        print("|---|---|---|---|---|")
        for case in arguments.others or OTHERS:
            for generation in arguments.generations:
                print(other_rows(case, generation), flush=True)
        return
    print("| case | chip | forward | splash | total | backward | splash | fused | total |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in arguments.cases:
        for generation in arguments.generations:
            print(row(case, generation), flush=True)


def row(case: str, generation: str) -> str:
    ours, splash, fused = (counts(case, generation, side) for side in SIDES)
    cells = [case, generation]
    for direction in DIRECTIONS:
        result, peers = ours[direction], [splash[direction], fused[direction]]
        cells += [result["blocks"], peers[0]["blocks"]]
        if direction == "backward":
            cells.append(peers[1]["blocks"])
        cells.append("" if result["total"] is None else f"{result['total'] / 1e6:.2f}")
        least = min((x["total"] for x in peers if x["total"]), default=None)
        if result["total"] and least:
            cells[-1] += f" ({result['total'] / least:.2f}x)"
    return f"| {' | '.join(cells)} |"


def other_rows(case: str, generation: str) -> str:
    """Returns a table row for each kernel of a case without a peer."""
    sizes, kernels = compiled(case, generation, "ours")
    return "\n".join(
        f"| {case} | {generation} | {name.removeprefix('lcjax_')} | {sizes[name]} | "
        + f"{'/'.join(f'{x.bundles:,}' for x in parts)} ({parts[-1].mxu:.0%}) |"
        for name, parts in kernels.items()
        if name in sizes
    )


def xla_rows(generation: str) -> str:
    """Returns table rows of the XLA form of the gated delta rule, for a token and head.

    One chunk, so that no operation runs several times. Cycles are the sum of the compiler's
    estimates for its operations, bytes what these read and write together.
    """
    from lcjax.cost.compilers import TPU_ENVIRONMENT

    os.environ |= TPU_ENVIRONMENT | {"JAX_PLATFORMS": "cpu"}
    import jax
    from jax.experimental import topologies

    from pallas_kernels import gated_delta_rule

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])
    tokens, heads = 64, 32
    shape = 1, tokens, heads
    x = jax.ShapeDtypeStruct((*shape, 128), "bfloat16", sharding=place)
    gate = jax.ShapeDtypeStruct(shape, "float32", sharding=place)

    def forward(*x):
        return gated_delta_rule(*x, implementation="xla")[0]

    def gradients(d_out, *x):
        return jax.vjp(forward, *x)[1](d_out)

    inputs, rows = (x, x, x, gate, gate), []
    for name, function, arrays in (("forward", forward, ()), ("both passes", gradients, (x,))):
        lowered = jax.jit(function).trace(*arrays, *inputs).lower(lowering_platforms=("tpu",))
        program = lowered.compile()
        text, cost = program.as_text(), program.cost_analysis()
        assert " while(" not in text
        cycles = sum(map(int, re.findall(r'estimated_cycles":"(\d+)"', text)))
        per_token = [x / tokens / heads for x in (cycles, cost["bytes accessed"])]
        rows.append(f"| {generation} | {name} | {per_token[0]:.1f} | {per_token[1]:,.0f} |")
    return "\n".join(rows)


def compiled(case: str, generation: str, side: str) -> tuple[dict, dict[str, list[Region]]]:
    """Compiles a side in a worker; returns the worker's JSON, and the kernels' regions by name.

    Raises:
      RuntimeError: the side does not compile the case.
    """
    from lcjax.cost.compilers import TPU_ENVIRONMENT

    with tempfile.TemporaryDirectory() as folder:
        environment = TPU_ENVIRONMENT | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        }
        command = [sys.executable, __file__, "--worker", case, generation, side]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        kernels = {
            match[2]: regions(Path(folder), match[1])
            for match in map(_KERNEL.match, sorted(os.listdir(folder)))
            if match
        }
    return json.loads(done.stdout.splitlines()[-1]), kernels


def counts(case: str, generation: str, side: str) -> dict[str, dict]:
    """Returns bundles by direction: `total` of a head, and `blocks`, those of a block as text.

    `total` is None for a side that does not compile the case.
    """
    try:
        visits, kernels = compiled(case, generation, side)
    except RuntimeError as error:
        print(f"{case}, {generation}, {side}: {error}", file=sys.stderr)
        return {key: {"total": None, "blocks": "refused"} for key in DIRECTIONS}
    result = {}
    for direction in DIRECTIONS:
        total, used, texts = 0, 0.0, []
        for name, code in kernels.items():
            seen = [x for prefix, x in visits[direction].items() if name.startswith(prefix)]
            if not seen:
                continue
            (seen,) = seen
            # If blocks without a mask have their own code, it precedes that of the other blocks.
            code = code if len(code) == len(seen["visits"]) else [code[-1]] * len(seen["visits"])
            for count, region in zip(seen["visits"], code):
                total += count * region.bundles
                used += count * region.bundles * region.mxu
            scores = seen["scores"] / BLOCK**2
            texts.append("/".join(f"{x.bundles / scores:,.0f}" for x in dict.fromkeys(code)))
        blocks = f"{' + '.join(texts)} ({used / total:.0%})"
        result[direction] = {"total": total, "blocks": blocks}
    return result


def regions(folder: Path, kernel: str) -> list[Region]:
    """Returns the long regions of a kernel that use the matrix units, in program order."""
    (schedule,) = (
        file
        for file in folder.glob(f"{kernel}*-final_bundles.txt")
        if "schedule-analysis" not in file.name and "static_gap" not in file.name
    )
    (use,) = folder.glob(f"{kernel}*-final_hlo-static-per-bundle-utilization.txt")
    lines = use.read_text().split("== UTILIZATION:")[1].splitlines()
    slots = [[*map(int, line.split())] for line in lines if re.fullmatch(r"[\d ]+", line)]
    marks = [*filter(None, map(_LINE.match, schedule.read_text().splitlines()))]
    result, start = [], 0
    for index, mark in enumerate(marks):
        is_last = index + 1 == len(marks)
        if is_last or "sbr" in mark[2] or marks[index + 1][1]:
            part = slots[start : index + 1]
            start = index + 1
            used = sum(bundle[SLOTS.index("MXU")] for bundle in part)
            if len(part) >= 200 and used:
                result.append(Region(len(part), used / 4 / len(part)))
    return result


def compile_side(case: str, generation: str, side: str) -> None:
    """Compiles a side; prints its visits of blocks, or the sizes of its steps, as JSON."""
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])
    device = jax.sharding.AbstractDevice(topology.devices[0].device_kind, 1, "tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        if case in OTHERS:
            function, shapes, about = OTHERS[case]()
        else:
            build = our_side if side == "ours" else splash_side
            attend, shape, about = build(CASES[case], is_fused=side == "splash_fused")
            function, shapes = with_gradients(attend), [(shape, "bfloat16")] * 4
        arrays = [jax.ShapeDtypeStruct(*x, sharding=place) for x in shapes]
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",))
    lowered.compile()
    print(json.dumps(about))


def with_gradients(function):
    import jax

    def both(q, k, v, d_out):
        out, pull = jax.vjp(function, q, k, v)
        return out, pull(d_out)

    return both


def landmark_side():
    """Returns (function of arrays, their shapes, the rows x keys of a step by kernel)."""
    import jax

    from pallas_kernels import landmark_attention
    from pallas_kernels.backends.tpu import landmark

    shape, block = (1, TOKENS, HEADS, 128), 64
    array, sizes = jax.ShapeDtypeStruct(shape, "bfloat16"), {}
    for names, is_backward in ((("forward",), False), (("d_queries", "d_keys", "d_all"), True)):
        tiling, _ = landmark.make_tiling(array, array, array, block, is_backward)
        step = f"{tiling.rows} x {tiling.key_block}"
        sizes |= {f"lcjax_landmark_{name}": step for name in names}
    function = with_gradients(lambda q, k, v: landmark_attention(q, k, v, block)[0])
    return function, [(shape, "bfloat16")] * 4, sizes


def decoding_side(size: int, codes: str | None = None):
    """Returns as `landmark_side`: one query in 8 rows, 32 heads, 4 of which share a key head.

    `codes` is the dtype of keys and values with a scale for each slot and head; None: bfloat16.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels import Scaled, causal, decode
    from pallas_kernels.backends.tpu.decode import _key_block
    from pallas_kernels.quantised import swap_heads

    def attend(q, index, *arrays):
        k, v = arrays if codes is None else (Scaled(*arrays[:2]), Scaled(*arrays[2:]))
        return decode(q, k, v, causal(), q_index=index)[0]

    q, slots = ((8, 1, 32, size), "bfloat16"), (8, 8, 2 * TOKENS)
    pair = [((*slots, size), codes or "bfloat16"), ((*slots, 1), "float32")][: 1 + bool(codes)]
    shapes = [q, ((1,), "int32"), *pair, *pair]
    x = [jax.ShapeDtypeStruct(*shape) for shape in (q, *pair)]
    k = jax.eval_shape(lambda *x: jax.tree.map(swap_heads, Scaled(*x) if codes else x[0]), *x[1:])
    step = f"4 x {_key_block(x[0], k, k)}"
    total = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes)
    print(f"{size}, {codes or 'bfloat16'}: {total / 2**20:.0f} MiB are read", file=sys.stderr)
    return attend, shapes, {"lcjax_decode": step}


def delta_rule_side():
    """Returns as `landmark_side`: the gated delta rule with heads of Qwen3-Next."""
    import jax

    from pallas_kernels import gated_delta_rule
    from pallas_kernels.backends.tpu import delta_rule

    def both(q, k, v, log_decay, beta, d_out):
        out, pull = jax.vjp(lambda *x: gated_delta_rule(*x)[0], q, k, v, log_decay, beta)
        return out, pull(d_out)

    q, gate = ((1, TOKENS, HEADS, 128), "bfloat16"), ((1, TOKENS, HEADS), "float32")
    array = jax.ShapeDtypeStruct(*q)
    x = delta_rule.Sizes.of(array, array)
    step = f"{x.heads} heads x {x.group} tokens"
    names = ("forward", "backward")
    return both, [q, q, q, gate, gate, q], {f"lcjax_delta_rule_{x}": step for x in names}


OTHERS = {
    "one query, heads of 128": functools.partial(decoding_side, 128),
    "one query, heads of 128, int8": functools.partial(decoding_side, 128, "int8"),
    "one query, heads of 128, float8": functools.partial(decoding_side, 128, "float8_e4m3fn"),
    "one query, heads of 64": functools.partial(decoding_side, 64),
    "Landmark, blocks of 64": landmark_side,
    "gated delta rule": delta_rule_side,
}


def our_side(case: Case, is_fused: bool):
    """Returns (function of q, k, v; their shape; visits per head of unmasked and masked blocks)."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import causal, flash, window
    from pallas_kernels.backends.tpu import attention, grid
    from pallas_kernels.dispatch import Constant, Operands, Spec
    from pallas_kernels.tables import from_block_mask

    mask = causal() if case.window is None else causal() & window(case.window)
    table, blocks = None, case.blocks()
    if case.density is not None:
        full = blocks & ~np.eye(len(blocks), dtype=bool)
        table = from_block_mask(blocks, full=full, q_block=BLOCK, k_block=BLOCK)
    segments = np.repeat(np.arange(case.documents), TOKENS // case.documents)[None] + 1
    segments = None if case.documents == 1 else segments.astype(np.int32)
    shape = (1, TOKENS, HEADS, case.size)

    def attend(q, k, v):
        options = {"q_segments": segments, "k_segments": segments, "table": table}
        return flash(q, k, v, mask, **options)[0]

    array = jax.ShapeDtypeStruct(shape, "bfloat16")
    ids = None if segments is None else jnp.asarray(segments)
    operands = Operands(q_segments=ids, k_segments=ids)
    spec = Spec(mask, case.size**-0.5, None, None if table is None else Constant(table), None)
    visits = {}
    for direction, names in (
        ("forward", ["lcjax_forward"]),
        ("backward", ["lcjax_d_queries", "lcjax_d_keys", "lcjax_d_all"]),
    ):
        is_backward = direction == "backward"
        tiling, listed = attention._plan(array, array, array, operands, spec, is_backward)
        kinds = np.asarray(listed.kind)[np.asarray(listed.valid)]
        repeats = HEADS if listed.valid.shape[1] > 1 else 1
        one = {
            "scores": tiling.rows * tiling.key_block,
            "visits": [int((kinds == kind).sum()) // repeats for kind in (grid.FULL, grid.PARTIAL)],
        }
        visits[direction] = dict.fromkeys(names, one)
    return attend, shape, visits


def splash_side(case: Case, is_fused: bool):
    """Returns as `our_side`; splash attention tests the mask in every visited block."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.CausalMask((TOKENS, TOKENS))
    if case.window is not None:
        mask = masks.LocalMask((TOKENS, TOKENS), (case.window - 1, 0), 0)
    elif case.density is not None:
        mask = masks.NumpyMask(case.pairs())
    dq = None if is_fused else BLOCK
    sizes = kernel.BlockSizes(
        block_q=BLOCK,
        block_kv=BLOCK,
        block_kv_compute=BLOCK // 2,
        block_q_dkv=BLOCK,
        block_kv_dkv=BLOCK,
        block_kv_dkv_compute=BLOCK // 2,
        block_q_dq=dq,
        block_kv_dq=dq,
        use_fused_bwd_kernel=is_fused,
    )
    splash = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * HEADS), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )
    segments = None
    if case.documents > 1:
        ids = np.repeat(np.arange(case.documents), TOKENS // case.documents).astype(np.int32)
        segments = kernel.SegmentIds(ids, ids)

    def attend(q, k, v):
        return splash(q * case.size**-0.5, k, v, segment_ids=segments)

    count = TOKENS // BLOCK
    seen = case.pairs().reshape(count, BLOCK, count, BLOCK).any((1, 3))
    one = {"scores": BLOCK**2, "visits": [int(seen.sum())]}
    backward = ["splash_mha_dkv"] if is_fused else ["splash_mha_dkv", "splash_mha_dq"]
    visits = {"forward": {"splash_mha_fwd": one}, "backward": dict.fromkeys(backward, one)}
    return attend, (HEADS, TOKENS, case.size), visits


if __name__ == "__main__":
    main()
