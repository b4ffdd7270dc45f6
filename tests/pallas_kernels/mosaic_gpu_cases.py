"""What the Hopper kernels have to compute, in the interpreter and as compiled programs."""

import dataclasses

from attention_oracle import Blocked, Case

from pallas_kernels import causal, everything, per_head, prefix, window

CASES = {
    "causal, grouped heads, odd lengths": Case(
        batch=1, t=200, s=200, heads=2, kv_heads=1, size=64, v_size=64
    ),
    "window of more keys than queries, two head sizes, float16": Case(
        batch=1, t=130, s=260, heads=1, kv_heads=1, size=32, v_size=80, dtype="float16",
        mask=causal() & (window(70) | prefix(5)), offset=100,
    ),
    "documents with padding, soft cap": Case(
        batch=2, t=130, s=130, heads=1, kv_heads=1, size=64, v_size=64, segments=3, soft_cap=2.0
    ),
    "places of every row": Case(
        batch=2, t=70, s=150, heads=1, kv_heads=1, size=64, v_size=64, own_places=True
    ),
    "queries before every key": Case(
        batch=1, t=140, s=130, heads=1, kv_heads=1, size=64, v_size=64, offset=-60
    ),
    "traced tables per query head, blocks of 64": Case(
        batch=2, t=192, s=256, heads=4, kv_heads=2, size=64, v_size=64, mask=causal(), offset=64,
        table=Blocked(rows=2, heads=4, q_block=64, k_block=64, traced=True),
    ),
    "tables per key head, blocks of several tiles": Case(
        batch=1, t=300, s=300, heads=4, kv_heads=2, size=64, v_size=64, mask=everything(),
        table=Blocked(heads=2, q_block=256, k_block=256),
    ),
    "a lone full block of fewer keys than a tile": Case(
        batch=1, t=80, s=32, heads=2, kv_heads=1, size=64, v_size=64, mask=everything(),
        table=Blocked(heads=2, q_block=80, k_block=32),
    ),
    "three warpgroups: window, grouped heads, odd lengths": Case(
        batch=1, t=370, s=370, heads=2, kv_heads=1, size=64, v_size=64,
        mask=causal() & (window(150) | prefix(5)),
    ),
    "three warpgroups: documents with padding, two head sizes": Case(
        batch=2, t=330, s=301, heads=1, kv_heads=1, size=48, v_size=64, segments=3,
        mask=everything(),
    ),
    "three warpgroups: traced tables per query head, blocks of 192": Case(
        batch=1, t=500, s=200, heads=2, kv_heads=1, size=64, v_size=32, mask=causal(),
        table=Blocked(heads=2, q_block=192, k_block=64, traced=True), dtype="float16",
    ),
    "dk and dv per query head: window, two head sizes, float16": Case(
        batch=1, t=1030, s=130, heads=2, kv_heads=1, size=32, v_size=48, dtype="float16",
        mask=causal() & window(700), offset=-300,
    ),
    "dk and dv per query head: tables, documents": Case(
        batch=2, t=1040, s=140, heads=2, kv_heads=1, size=64, v_size=64, segments=3,
        mask=everything(), table=Blocked(rows=2, heads=2, q_block=128, k_block=64),
    ),
    "soft cap, heads of 128": Case(
        batch=1, t=70, s=130, heads=1, kv_heads=1, size=128, v_size=96, soft_cap=1.5
    ),
    "masks per head, heads of 128": Case(
        batch=1, t=150, s=150, heads=2, kv_heads=2, size=128, v_size=128,
        mask=per_head((causal(), 1), (window(20), 1)),
    ),
}  # fmt: skip
CASES = {
    name: case if case.dtype == "float16" else dataclasses.replace(case, dtype="bfloat16")
    for name, case in CASES.items()
}
