"""SeerAttention: its gates, the attention between blocks that they learn, and what prompts read."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_golden as golden
from chosen_support import largest_array
from tiny_lm import generated, ids, sharp_lm

from lcjax.attention import AttentionMetadata, Causal, SeerAttention, order_indices
from lcjax.attention.base import Features, rotate_qk
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation.sampling import Sampling
from lcjax.rope.rotation import Rotation
from lcjax.training.train_config import TrainConfig
from pallas_kernels import gather

CASE = "seer.prefill"
CLOSE = {"rtol": 1e-5, "atol": 3e-6}


def rotation_of(base, size):
    return Rotation(jnp.asarray(base ** -(np.arange(0, size, 2) / size), jnp.float32))


def metadata_of(segments, parameters, rotation):
    index = order_indices(segments)
    return AttentionMetadata(
        index,
        index,
        rotation=rotation,
        q_index=index,
        k_index=index,
        q_segments=segments,
        k_segments=segments,
        features=Features({}, {}, parameters),
    )


def case():
    """The pattern with a threshold, queries and keys, and metadata of the golden case."""
    params, x = golden.params(CASE), golden.arrays(CASE)
    pattern = SeerAttention(
        block=params["block"], gate_dim=params["gate_dim"], threshold=params["threshold"], last=0
    )
    k_heads, _, gate = x["wk"].shape
    parameters = {
        "gate_query": jnp.asarray(x["wq"]),
        "gate_key": jnp.asarray(x["wk"]).reshape(k_heads, 3, -1, gate),
    }
    q, k = (jnp.asarray(x[name]) for name in "qk")
    segments = jnp.ones(q.shape[:2], jnp.int32)
    rotation = rotation_of(params["rope_base"], params["head_dim"])
    return pattern, q, k, metadata_of(segments, parameters, rotation), x


def visible_blocks(pattern, q, k, metadata, block):
    """Which blocks of keys each block of queries reads [B, N, nq, nk], by values that say so."""
    count = -(-k.shape[1] // block)
    names = jax.nn.one_hot(jnp.arange(k.shape[1]) // block, count)
    v = jnp.broadcast_to(names[None, :, None], (*k.shape[:3], count))
    out = jax.jit(functools.partial(pattern.attend, metadata=metadata))(q, k, v)
    ends = np.minimum(np.arange(1, count + 1) * block, q.shape[1]) - 1
    return np.asarray(out).swapaxes(1, 2)[:, :, ends] > 0


def test_blocks_that_are_read_are_those_of_the_authors():
    pattern, q, k, metadata, x = case()
    visible = visible_blocks(pattern, q, k, metadata, pattern.block)
    want = x["chosen_threshold"] & np.tril(np.ones(visible.shape[-2:], bool))
    np.testing.assert_array_equal(visible, want)
    assert want.any(-1).mean() > 0.9 and want.mean() < 0.5
    # With a share of the pairs: as many as the paper's rule, of the highest gates.
    nb = visible.shape[-1]
    some = visible_blocks(replace(pattern, share=0.5), q, k, metadata, pattern.block)
    count = int(np.ceil((1 - np.sqrt(0.5)) * nb))
    np.testing.assert_array_equal(some.sum(-1)[0, 0], np.minimum(np.arange(nb) + 1, count))
    chosen = np.where(some, x["gate"], np.inf).min(-1)
    assert (chosen > np.where(some, -np.inf, x["gate"]).max(-1)).all()
    # The last blocks of queries see all.
    last = visible_blocks(replace(pattern, last=2), q, k, metadata, pattern.block)
    np.testing.assert_array_equal(last[:, :, :-2], visible[:, :, :-2])
    assert last[:, :, -1].all() and last[:, :, -2].sum(-1).min() == nb - 1


def divergence(pattern, q, k, metadata):
    return jax.jit(functools.partial(pattern.divergence, metadata=metadata))(q, k)


def between_blocks(q, k, rotation, block):
    """The largest probability of each pair of blocks of one text, a row divided by its sum."""
    places = jnp.arange(q.shape[1])[None]
    q, k = rotate_qk(q, k, AttentionMetadata(places, places, rotation=rotation))
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = jnp.einsum("BTNH,BSNH->BNTS", q, k, precision="highest") * q.shape[-1] ** -0.5
    logits = jnp.where(np.tri(q.shape[1], dtype=bool), logits, -jnp.inf)
    weights = jax.nn.softmax(logits, -1)
    nb = q.shape[1] // block
    squares = weights.reshape(*weights.shape[:2], nb, block, nb, block).max((3, 5))
    return squares / squares.sum(-1, keepdims=True)


def test_the_divergence_is_that_of_the_authors():
    pattern, q, k, metadata, x = case()
    block, nb = pattern.block, x["gate"].shape[-1]
    apart = divergence(pattern, q, k, metadata).reshape(1, nb, block)
    np.testing.assert_array_equal(apart, np.repeat(apart[..., :1], block, -1))
    np.testing.assert_allclose(between_blocks(q, k, metadata.rotation, block), x["target"], **CLOSE)
    target, scores = (x[name].astype(np.float64) for name in ("target", "gate"))
    gate = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    past = np.tril(np.ones((nb, nb), bool))
    target, gate = (np.where(past, x, 1) for x in (target, gate))
    each = (target * np.log(target / gate)).sum(-1)
    np.testing.assert_allclose(apart[0, :, 0], each[0].mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(apart[0, nb // 4 :, 0].mean(), x["loss_rows"], rtol=1e-4)


def test_gradients_of_the_gates_are_those_of_all_pairs(monkeypatch):
    pattern, q, k, metadata, x = case()
    target = jnp.asarray(x["target"])
    past = np.tril(np.ones(target.shape[-2:], bool))

    def loss(parameters, q, k):
        changed = metadata.replace(features=Features({}, {}, parameters))
        return pattern.divergence(q, k, changed).mean()

    def all_pairs(parameters, q, k):
        rows, length, heads, size = q.shape
        pooled = q.reshape(rows, -1, pattern.block, heads, size).mean(2)
        blocks = k.reshape(rows, -1, pattern.block, k.shape[2], size)
        pools = jnp.stack([blocks.max(2), blocks.min(2), blocks.mean(2)], 3)
        at = jnp.arange(0, length, pattern.block)[None]
        rotation = rotation_of(golden.params(CASE)["rope_base"], pattern.gate_dim)
        gq = jnp.einsum("BCNH,NHJ->BCNJ", pooled, parameters["gate_query"], precision="highest")
        gk = jnp.einsum("BCKPH,KPHJ->BCKJ", pools, parameters["gate_key"], precision="highest")
        gq, gk = rotation.rotate(gq, at), rotation.rotate(gk, at)
        gk = jnp.repeat(gk, heads // k.shape[2], axis=2)
        scores = jnp.einsum("BCNJ,BDNJ->BNCD", gq, gk, precision="highest")
        scores = jnp.where(past, scores * pattern.gate_dim**-0.5, -jnp.inf)
        log = jnp.where(past, jax.nn.log_softmax(scores, -1), 0)
        return -(target * log).sum(-1).mean()

    parameters = metadata.features.layer
    want = jax.grad(all_pairs)(parameters, q, k)
    for budget in (gather.BUDGET, 3000):  # some blocks at a time
        monkeypatch.setattr(gather, "BUDGET", budget)
        got = jax.jit(jax.grad(loss))(parameters, q, k)
        for name, slope in got.items():
            assert abs(slope).max() > 1e-4
            np.testing.assert_allclose(slope, want[name], rtol=1e-3, atol=1e-6)


BLOCK = 8
SPARSE = SeerAttention(block=BLOCK, gate_dim=8, share=0.4, last=0)
ROTATION = rotation_of(100.0, 16)


def parameters(seed=0, heads=4, kv_heads=2, size=16):
    rng = np.random.default_rng(seed)
    shapes = {"gate_query": (heads, size, 8), "gate_key": (kv_heads, 3, size, 8)}
    return {n: jnp.asarray(rng.normal(size=shape), jnp.float32) for n, shape in shapes.items()}


def document(length, seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(length, n, 16)).astype(np.float32) for n in (4, 2, 2)]


def rows_of(documents, segments):
    """Rows of documents, whose numbers the segments are; padding has noise."""
    rng = np.random.default_rng(9)
    rows = [rng.normal(size=(*segments.shape, *x.shape[1:])) for x in documents[0]]
    for row, line in enumerate(segments):
        for number in set(line) - {0}:
            for padded, x in zip(rows, documents[number - 1], strict=True):
                padded[row, line == number] = x
    return [jnp.asarray(x, jnp.float32) for x in rows]


@functools.partial(jax.jit, static_argnums=0)
def results(pattern, q, k, v, segments):
    """Attention to chosen blocks, and the divergence."""
    metadata = metadata_of(segments, parameters(), ROTATION)
    return pattern.attend(q, k, v, metadata), pattern.divergence(q, k, metadata)


def test_documents_packed_padded_or_alone_have_the_same_results():
    documents = [document(61, 0), document(29, 1)]
    segments = np.zeros((4, 103), np.int32)
    segments[0, :61], segments[0, 61:90] = 1, 2
    segments[1, 42:] = 1  # padding before it
    segments[2, :61] = 1  # and behind it
    segments[3, 3:32], segments[3, 32:93] = 2, 1
    out, apart = map(np.asarray, results(SPARSE, *rows_of(documents, segments), segments))
    for number, one in enumerate(documents, 1):
        alone = np.ones((1, len(one[0])), np.int32)
        expected = results(SPARSE, *(jnp.asarray(x)[None] for x in one), alone)
        for row, line in enumerate(segments):
            if number in line:
                for result, want in zip((out, apart), expected, strict=True):
                    np.testing.assert_allclose(result[row, line == number], want[0], **CLOSE)
        complete = len(one[0]) // BLOCK * BLOCK
        assert expected[1][0, BLOCK:complete].all() and not expected[1][0, :BLOCK].any()
        assert not expected[1][0, complete:].any()  # an incomplete block teaches nothing
    assert not out[segments == 0].any() and not apart[segments == 0].any()


def test_a_prompt_reads_few_blocks_and_calls_that_begin_at_blocks_give_one_output():
    """Keys of a cache are rotated; their gates are those of unrotated keys."""
    q, k, v = (jnp.asarray(x)[None] for x in document(61, 2))
    segments = jnp.ones((1, 61), jnp.int32)
    whole = metadata_of(segments, parameters(), ROTATION)
    want = jax.jit(functools.partial(SPARSE.attend, metadata=whole))(q, k, v)
    full = jax.jit(functools.partial(Causal().attend, metadata=whole))(q, k, v)
    assert abs(want - full).max() > 1e-2
    scaled = ROTATION._replace(scale=1.25)
    for rotation in (ROTATION, scaled):
        whole = whole.replace(rotation=rotation)
        want = jax.jit(functools.partial(SPARSE.attend, metadata=whole))(q, k, v)
        at = jnp.arange(61)[None]
        rotated = rotation.rotate(k, at)
        for start, end in ((0, 24), (24, 61)):
            metadata = AttentionMetadata(
                at[:, start:end],
                at[:, :end],
                rotation=rotation,
                q_index=at[:, start:end],
                k_index=at[:, :end],
                keys_rotated=True,
                features=whole.features,
            )
            attend = jax.jit(functools.partial(SPARSE.attend, metadata=metadata))
            out = attend(q[:, start:end], rotated[:, :end], v[:, :end])
            # How many blocks a share is depends on the length of the text so far.
            if end == 61:
                np.testing.assert_allclose(out, want[:, start:end], **CLOSE)


def test_all_blocks_dense_attention_and_short_calls_are_full_attention():
    q, k, v = (jnp.asarray(x)[None] for x in document(61, 3))
    metadata = metadata_of(jnp.ones((1, 61), jnp.int32), parameters(), ROTATION)
    want = Causal().attend(q, k, v, metadata)
    for fields in ({"share": 1.0}, {"share": None, "threshold": 0.0}, {"last": 8}):
        out = replace(SPARSE, **fields).attend(q, k, v, metadata)
        np.testing.assert_allclose(out, want, **CLOSE)
    np.testing.assert_array_equal(replace(SPARSE, dense=True).attend(q, k, v, metadata), want)
    last = metadata.replace(
        q_positions=metadata.q_positions[:, -7:],
        q_index=metadata.q_index[:, -7:],
        q_segments=metadata.q_segments[:, -7:],
    )
    out = SPARSE.attend(q[:, -7:], k, v, last)
    np.testing.assert_allclose(out, want[:, -7:], **CLOSE)


def test_only_later_tokens_of_the_own_block_have_a_part_in_the_output_of_a_token():
    q, k, v = (jnp.asarray(x)[None] for x in document(61, 4))
    metadata = metadata_of(jnp.ones((1, 61), jnp.int32), parameters(), ROTATION)
    attend = jax.jit(
        functools.partial(replace(SPARSE, share=None, threshold=0.2).attend, metadata=metadata)
    )
    before = np.asarray(attend(q, k, v))
    at, start = 35, 32
    after = np.asarray(attend(*(x.at[:, at:].multiply(-3.0) for x in (q, k, v))))
    np.testing.assert_array_equal(before[:, :start], after[:, :start])


def test_a_model_reads_prompts_with_its_gates_and_decodes_with_all_keys():
    lm = sharp_lm(pattern=SPARSE)
    prompts = [ids(1, 45), ids(2, 30)]
    options = Sampling(max_new_tokens=6, min_new_tokens=6)
    together = generated(lm, prompts, options)
    assert together == [generated(lm, [prompt], options)[0] for prompt in prompts]


def test_gates_are_trained_under_full_attention_alone():
    assert not SPARSE.is_causal and SPARSE.needs_whole_prompt
    dense = replace(SPARSE, dense=True)
    assert dense.is_causal and not dense.needs_whole_prompt
    TrainConfig(model=ModelSection(preset="tiny", pattern=dense))
    with pytest.raises(InputError, match=r"seer.*nothing can be trained.*dense: true"):
        TrainConfig(model=ModelSection(preset="tiny", pattern=SPARSE))
    with pytest.raises(InputError, match="seer.*no score"):
        SPARSE.check_scores()
    dense.check_scores()
    with pytest.raises(InputError, match=r"pattern\.share=0"):
        SeerAttention(share=0.0)


def test_no_array_of_the_divergence_grows_with_the_square_of_the_text():
    length, pattern = 32_768, SeerAttention(gate_dim=32, dense=True)

    def run(parameters, q, k):
        places = jnp.arange(length)[None]
        features = Features({}, {}, parameters)
        return pattern.divergence(q, k, AttentionMetadata(places, places, features=features)).sum()

    shapes = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (4, 1)]
    gates = {"gate_query": (4, 64, 32), "gate_key": (1, 3, 64, 32)}
    gates = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in gates.items()}
    traced = jax.make_jaxpr(jax.grad(run))(gates, *shapes)
    # T x T has 256 times as many numbers: a block of queries and all keys for each head.
    assert largest_array(traced.jaxpr) <= 16 * length * 64
