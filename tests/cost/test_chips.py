"""Chips and topologies by name, and collectives counted in a compiler's text."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lcjax.cost.__main__ import column
from lcjax.cost.chips import CHIPS, Topology
from lcjax.cost.program import (
    Traffic,
    between_slices,
    collectives,
    host_copies,
    permuted_bytes,
    program_cost,
)
from lcjax.cost.roofline import Work
from lcjax.errors import InputError
from lcjax.parallel.sharding import Mesh, make_mesh

WORK = Work(flops=1e9, bytes=1e6)


@pytest.mark.parametrize(
    ("text", "devices", "tpu"),
    [
        ("v5e:4x4", 16, True),
        ("v5p:2x2x2", 8, True),
        ("v5p:2x2x2*4", 32, True),
        ("h200:8", 8, False),
        ("h200:8*2", 16, False),
        ("a100-80:1", 1, False),
    ],
)
def test_a_topology_names_a_chip_and_how_many(text, devices, tpu):
    found = Topology.parse(text)
    assert (str(found), found.devices, found.tpu) == (text, devices, tpu)


@pytest.mark.parametrize(
    "text",
    ["v5e", "v5e:", "v5e:16", "v5p:2x2", "h200:2x4", "v5e:0x4", "v5e:4x", "h100:" + "9" * 5000],
    ids=lambda text: text[:9],
)
def test_an_unknown_topology_raises_input_error_with_a_valid_one(text):
    chip = text.partition(":")[0]
    with pytest.raises(InputError, match=rf"write the devices, as {chip}:\d"):
        Topology.parse(text)


@pytest.mark.parametrize("slices", ["*", "*0", "*x", "*2*2", "*99999"])
def test_a_number_of_slices_that_is_none_raises_input_error_with_a_valid_one(slices):
    with pytest.raises(InputError, match=r"write the number of slices, as v5e:2x2\*2$"):
        Topology.parse(f"v5e:2x2{slices}")


def test_an_unknown_chip_raises_input_error_with_the_known_ones():
    with pytest.raises(InputError, match="v7x.*v4, v5e"):
        Topology.parse("v7x:4x4")


def test_no_program_may_use_more_than_a_chip_has():
    assert all(0.9 * chip.memory < chip.usable < chip.memory for chip in CHIPS.values())


def loop(mesh, trips):
    """Sums over all devices, `trips` times, a square of float32 that nothing lets XLA hoist."""

    def f(x):
        def body(x, _):
            return jax.lax.with_sharding_constraint(jnp.sin(x) @ x, rows), None

        return jax.lax.scan(body, x, None, length=trips)[0]

    rows = NamedSharding(mesh, PartitionSpec("fsdp", None))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)
    return jax.jit(f).lower(x)


def test_a_collective_in_a_loop_counts_as_often_as_it_runs():
    mesh = make_mesh(Mesh(fsdp=8))
    found = collectives(loop(mesh, 5).compile().as_text())
    assert found == {"all-gather": Traffic(5, 5 * 64 * 64 * 4 * 7 // 8)}


def test_the_cost_of_a_program_is_compared_with_the_memory_of_a_chip():
    found = program_cost(loop(make_mesh(Mesh(fsdp=8)), 3), CHIPS["v5e"])
    assert found.fits and found.traffic["all-gather"].count == 3
    assert column(found, WORK)["peak, GB"].endswith("of 16.9: fits")
    assert found.arguments == 64 * 64 * 4 / 8
    tight = type(found)(**{**vars(found), "peak_memory": found.chip.usable + 1})
    assert not tight.fits and column(tight, WORK)["peak, GB"] == "16.9 of 16.9: does not fit"


HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=8\n"


def test_a_part_of_a_fusion_repeats_no_collective():
    text = """
%part.1 (p: bf16[8]) -> bf16[64] {
  %a.1 = bf16[64]{0} all-gather(%p), channel_id=7, dimensions={0}
}

%part.2 (p: bf16[8]) -> bf16[64] {
  %a.2 = bf16[64]{0} all-gather(%p), channel_id=7, dimensions={0}
}

ENTRY %main (p: bf16[8]) -> bf16[64] {
  %f.1 = bf16[64]{0} fusion(%p), kind=kCustom, calls=%part.1
  %f.2 = bf16[64]{0} fusion(%p), kind=kCustom, calls=%part.2
  %r = (f32[4]{0}, s32[2]{0}) all-reduce(%x, %y), channel_id=8, to_apply=%sum
}
"""
    found = collectives(HEADER + text)
    assert found == {"all-gather": Traffic(1, 112, 1), "all-reduce": Traffic(1, 2 * 21)}


@pytest.mark.parametrize(
    ("operation", "kind", "received"),
    [
        ("f32[64]{0} all-gather(%x), replica_groups={{0,1},{2,3}}", "all-gather", 128),
        ("f32[64]{0} all-reduce(%x), replica_groups=[2,4]<=[8]", "all-reduce", 2 * 192),
        ("f32[8]{0} reduce-scatter(%x), replica_groups={}", "reduce-scatter", 8 * 4 * 7),
        (
            "f32[64]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add",
            "all-reduce",
            2 * 192,
        ),
        ("f32[64]{0} all-to-all(%x), replica_groups=mesh['a'=8] {'a':(1)4}", "all-to-all", 192),
        (
            "(f32[8]{0}, f32[64]{0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}",
            "all-gather",
            224,
        ),
        (
            "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), pairs={{0,1}}",
            "collective-permute",
            32,
        ),
        (
            "((f32[8]{0}, s32[2]{0}), (f32[8]{0}, s32[2]{0})) collective-permute-start(%x, %y)",
            "collective-permute",
            40,
        ),
    ],
)
def test_bytes_count_the_traffic_received_by_a_device(operation, kind, received):
    text = f"{HEADER}\nENTRY %main (x: f32[8]) -> f32[8] {{\n  %r = {operation}\n}}\n"
    assert collectives(text) == {kind: Traffic(1, received)}


MESH = "mesh['a'=4,'b'=1,'c'=2], device_ids"  # of 2 slices: 'a' is inside, and 'c' between them


@pytest.mark.parametrize(
    ("operation", "received", "between"),
    [
        ("f32[64]{0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}", 192, 0),
        ("f32[64]{0} all-gather(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}", 128, 128),
        ("f32[64]{0} all-gather(%x), replica_groups=[2,4]<=[8]", 192, 0),
        ("f32[64]{0} all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0)", 128, 128),
        ("f32[64]{0} all-gather(%x), replica_groups={}", 224, 128 / 4),
        ("f32[64]{0} all-reduce(%x), replica_groups={}", 2 * 224, 2 * 128 / 4),
        ("f32[64]{0} reduce-scatter(%x), replica_groups={}", 256 * 7, 256),
        ("f32[64]{0} all-to-all(%x), replica_groups={}", 224, 128),
        (f"f32[64]{{0}} all-gather(%x), replica_groups={MESH}=([2,4]T(1,0)) {{'a'}}", 192, 0),
        (f"f32[64]{{0}} all-gather(%x), replica_groups={MESH}=([2,4]T(1,0)) {{'c'}}", 128, 128),
        (f"f32[64]{{0}} all-gather(%x), replica_groups={MESH}=(0,4,1,5,2,6,3,7) {{'a'}}", 192, 0),
        ("f32[64]{0} all-gather(%x), replica_groups=mesh['a'=8] {'a':(1)2}", 128, 128),
        ("f32[64]{0} all-gather(%x), replica_groups=mesh['a'=8] {'a':(4)2}", 128, 0),
        ("f32[64]{0} collective-permute(%x), source_target_pairs={{0,1},{4,5}}", 256, 0),
        ("f32[64]{0} collective-permute(%x), source_target_pairs={{0,1},{3,4}}", 256, 256),
    ],
)
def test_bytes_of_groups_with_devices_of_two_slices(operation, received, between):
    text = f"{HEADER}\nENTRY %main (x: f32[8]) -> f32[8] {{\n  %r = {operation}\n}}\n"
    (found,) = collectives(text).values()
    assert found.bytes == received
    count = int(between > 0)
    assert between_slices(text, [0] * 4 + [1] * 4) == Traffic(count, between)
    assert between_slices(text, [0] * 8) == between_slices(text) == Traffic(0, 0)


@pytest.mark.parametrize(
    ("target", "kind", "received"),
    [
        ('"{1,2}x{0:3}"', "ALL_REDUCE", 256),
        ('"{1,2,3,4}x{0:3}"', "ALL_REDUCE", 2 * 192),
        ("{{100000,200000},{100001,200001}}", "ALL_GATHER", 128),
        ("{{100000,100001,200000,200001}}", "ALL_TO_ALL", 128),
        ("{{100000,200000},{100001,200001}}", "REDUCE_SCATTER", 256),
        ("{{100001->200000},{200001->100000}}", "ONE_TO_ONE", 256),
    ],
)
def test_what_a_slice_of_tpus_receives_names_its_collective(target, kind, received):
    attributes = f'{{_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    text = f"""
ENTRY %main (x: f32[64]) -> f32[64] {{
  %r = (f32[64]{{0}}, u32[], token[]) recv(%a), channel_id=2, frontend_attributes={attributes}
  %y = f32[64]{{0}} fusion(%x), calls=%add
  %d = (f32[64]{{0}}, token[]) recv-done(%r), channel_id=2
}}
"""
    assert between_slices(HEADER + text) == Traffic(1, received, 1)
    assert collectives(HEADER + text) == {}


@pytest.mark.parametrize(
    ("work", "overlapped"), [("fusion(%y), calls=%add", 1), ("bitcast(%y)", 0)]
)
def test_work_between_start_and_end_overlaps_a_collective(work, overlapped):
    text = f"""
ENTRY %main (x: f32[8]) -> f32[64] {{
  %s.1 = (f32[8]{{0}}, f32[64]{{0}}) all-gather-start(%x)
  %w = f32[8]{{0}} {work}
  %d = f32[64]{{0}} all-gather-done(%s.1)
  %later = f32[8]{{0}} fusion(%d), calls=%add
}}
"""
    assert collectives(HEADER + text) == {"all-gather": Traffic(1, 224, overlapped)}


@pytest.mark.parametrize("tile", ["", ":T(8,128)(2,1)"])  # of TPUs
@pytest.mark.parametrize("opcode", ["dynamic-slice", "fusion"])  # of TPUs, and of GPUs
def test_copies_from_and_to_the_host_are_counted_with_what_overlaps_them(opcode, tile):
    device, host = f"{{1,0{tile}}}", f"{{1,0{tile or ':'}S(5)}}"
    part, whole = "bf16[1,64]", "bf16[3,64]"
    text = f"""
%body (x: (s32[], {whole}, {part})) -> (s32[], {whole}, {part}) {{
  %all = {whole}{host} get-tuple-element(%x), index=1
  %i = s32[] get-tuple-element(%x), index=0
  %to = (({whole}{host}, s32[]), {part}{device}, u32[]) {opcode}-start(%all, %i), calls=%slice
  %w = {part}{device} fusion(%y), kind=kLoop, calls=%add
  %at = {part}{device} {opcode}-done(%to)
  %back = (({whole}{host}, {part}{device}, s32[]), {whole}{host}) {opcode}-start(%all, %w, %i)
  %done = {whole}{host} {opcode}-done(%back)
  %slow = {part}{device} dynamic-slice(%done, %i)
  %new = {whole}{host} dynamic-update-slice(%done, %slow, %i)
}}

%condition (x: (s32[], {whole}, {part})) -> pred[] {{
  %r = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (x: {whole}) -> {whole} {{
  %x = {whole}{host} parameter(0)
  %same = {whole}{host} copy(%x)
  %w = (s32[], {whole}{host}, {part}{device}) while(%x), condition=%condition, body=%body, TRIPS
}}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}')
    assert host_copies(HEADER + text) == Traffic(3 * 4, 3 * 4 * 128, 3)


def test_reduce_scatter_and_all_reduce_are_distinguished():
    text = """
%all-reduce-scatter.3 (x: f32[64]) -> f32[8] {
  %r = f32[64]{0} all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %s = f32[8]{0} dynamic-slice(%r, %at), dynamic_slice_sizes={8}
}

ENTRY %main (x: f32[64]) -> f32[8] {
  %f = f32[8]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
}
"""
    assert collectives(HEADER + text) == {"reduce-scatter": Traffic(1, 224)}


def test_the_compiler_knows_the_trips_of_a_loop_whose_condition_is_a_fusion():
    text = """
%body (x: f32[8]) -> f32[8] {
  %r = f32[64]{0} all-gather(%x), dimensions={0}
}

%condition (x: f32[8]) -> pred[] {
  %r = pred[] fusion(%x), kind=kLoop, calls=%compare
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%x), condition=%condition, body=%body, TRIPS
}
"""
    for trips in (1, 5):
        known = f'backend_config={{"known_trip_count":{{"n":"{trips}"}},"dynamic_variables":[]}}'
        found = collectives(HEADER + text.replace("TRIPS", known))
        assert found == {"all-gather": Traffic(trips, trips * 224)}


def test_the_messages_of_a_ring_are_counted_by_sender_and_receiver():
    mesh = make_mesh(Mesh(fsdp=8))
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def turn(x):
        def body(x, _):
            return jnp.sin(jax.lax.ppermute(x, "fsdp", ring)), None

        return jax.lax.scan(body, x, None, length=3)[0]

    spec = PartitionSpec("fsdp")
    program = jax.jit(jax.shard_map(turn, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jax.ShapeDtypeStruct((64, 4), jnp.float32)
    text = program.lower(x).compile().as_text()
    assert permuted_bytes(text) == dict.fromkeys(ring, 3 * 8 * 4 * 4)
    assert permuted_bytes(loop(mesh, 2).compile().as_text()) == {}


def test_a_group_of_one_device_receives_nothing():
    text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %r = f32[8]{0} all-reduce(%x), replica_groups={{0},{1}}
}
"""
    assert collectives(HEADER + text) == {}


@pytest.mark.parametrize(
    "message",
    [
        "Ran out of memory in memory space hbm. Used 47.50G of 15.75G hbm. Exceeded by 31.75G.",
        "Ran out of memory on HBM, the total memory required for HLO temporaries (47.50G) exceeds"
        " available HBM (15.75G).",
    ],
)
def test_a_compiler_that_runs_out_of_memory_has_spoken(message):
    found = program_cost(Refusing(f"RESOURCE_EXHAUSTED: {message}"), CHIPS["v5e"])
    assert found.peak_memory == 47.5 * 2**30 and not found.fits
    assert column(found, WORK)["peak, GB"] == "51 of 16.9: does not fit"


def test_other_failures_of_a_compiler_are_errors():
    with pytest.raises(jax.errors.JaxRuntimeError, match="VMEM"):
        program_cost(Refusing("INTERNAL: VMEM"), CHIPS["v5e"])


class Refusing:
    def __init__(self, message):
        self.message = message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)
