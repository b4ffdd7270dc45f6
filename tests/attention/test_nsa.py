"""NSA: its three branches, the blocks that it chooses, and decoding from a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_golden
from chosen_support import (
    CONFIG,
    MESHES,
    check_devices,
    check_generation,
    check_steps,
    largest_array,
)
from tiny_lm import sharp_lm

from lcjax.attention import NSA, AttentionMetadata, Causal, order_indices
from lcjax.attention.base import Features
from lcjax.attention.cache import LayerShape
from lcjax.attention.chosen_blocks import complete_blocks
from lcjax.attention.nsa import BranchCache
from lcjax.attention.on_devices import DocumentTokens
from lcjax.cost import resources
from lcjax.errors import InputError
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.tree import flatten, nest
from pallas_kernels import gather

SMALL = NSA(block=8, top_k=4, window=12)
OVERLAPPING = NSA(block=8, top_k=4, window=12, kernel=4, stride=2)
BOTH = pytest.mark.parametrize("pattern", [SMALL, OVERLAPPING], ids=["blocks", "overlapping"])


@pytest.fixture
def no_ties(monkeypatch):
    """The authors' code chooses among scores that are nearly equal, too."""
    monkeypatch.setattr(gather, "TIE", 2.0**-22)


def with_gates(metadata, gates):
    return metadata.replace(features=Features({"gates": jnp.asarray(gates)}, {}, {}))


@functools.partial(jax.jit, static_argnames="pattern")
def attend(q, k, v, gates, pattern, segments=None):
    if segments is None:
        places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        metadata = AttentionMetadata(places, places)
    else:
        index = order_indices(segments)
        documents = {"q_segments": segments, "k_segments": segments}
        metadata = AttentionMetadata(index, index, q_index=index, k_index=index, **documents)
    return pattern.attend(q, k, v, with_gates(metadata, gates))


def only(branch, q):
    """Gates that show one branch: 0 is of compressed blocks, 1 of chosen ones, 2 the window."""
    return jnp.broadcast_to(jnp.eye(3)[branch], (*q.shape[:3], 3))


@functools.partial(jax.jit, static_argnames="pattern")
def chosen(q, k, pattern, segments=None):
    """The blocks of its document that each token of a row reads, bool [K, T, blocks]."""
    params = {"cu_seqlens": [0, q.shape[1]]} if segments is None else {"cu_seqlens": segments}
    metadata = sparse_golden.metadata(params)
    places = jnp.broadcast_to(metadata.q_order, q.shape[:2])
    tokens = DocumentTokens(places, places, metadata.q_segments)
    blocks = complete_blocks(tokens, pattern.block)
    ids = pattern.choose(q, k, tokens, tokens, blocks, metadata)[0]
    count = blocks.numbers.shape[1]
    of_ids = jnp.where(ids < count, blocks.numbers[0, jnp.minimum(ids, count - 1)], -1)
    numbers = jnp.arange(-(-q.shape[1] // pattern.block))
    is_read = (of_ids[..., None] == numbers).any(2)
    current = places[0, :, None] // pattern.block
    return is_read | ((numbers <= current) & (numbers >= current - pattern.local))


def random_qkv(length, heads=4, kv_heads=2, size=8, rows=1, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((rows, length, n, size) for n in (heads, kv_heads, kv_heads))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("name", ["nsa.one", "nsa.packed"])
def test_values_choices_and_gradients_are_those_of_the_authors(name, no_ties):
    params, x = sparse_golden.params(name), sparse_golden.arrays(name)
    pattern = NSA(block=params["block"], top_k=params["count"], window=params["window"])
    metadata = sparse_golden.metadata(params)
    q, k, v = (jnp.asarray(x[n]) for n in "qkv")
    packed = None if len(params["cu_seqlens"]) == 2 else tuple(params["cu_seqlens"])
    is_read = chosen.__wrapped__(q, k, pattern, packed)
    width = x["chosen"].shape[-1]
    np.testing.assert_array_equal(is_read[..., :width], x["chosen"][0])
    assert not is_read[..., width:].any()
    names = ["g_cmp", "g_slc", "g_swa"]
    gates = jnp.stack([jnp.asarray(x[n]).swapaxes(1, 2) for n in names], -1)

    def run(q, k, v, gates):
        return pattern.attend(q, k, v, with_gates(metadata, gates))

    out, backward = jax.vjp(jax.jit(run), q, k, v, gates)
    np.testing.assert_allclose(out, x["out"], rtol=1e-5, atol=5e-6)
    for branch, part in enumerate(("o_cmp", "o_slc", "o_swa")):
        want = x[part] if x[part].shape == q.shape else x[part].swapaxes(1, 2)
        np.testing.assert_allclose(run(q, k, v, only(branch, q)), want, rtol=1e-5, atol=5e-6)
    *slopes, of_gates = backward(jnp.asarray(x["cotangent"]))
    for slope, n in zip(slopes, "qkv", strict=True):
        np.testing.assert_allclose(slope, x[f"d{n}"], rtol=1e-4, atol=5e-5)
    for branch, n in enumerate(names):
        want = x[f"d{n}"].swapaxes(1, 2)
        np.testing.assert_allclose(of_gates[..., branch], want, rtol=1e-4, atol=5e-5)


def test_a_window_counts_for_the_strides_that_it_shares_with_a_block():
    """The weights of the paper, 1, 2, 2, 2 and 1, of the windows that overlap a block."""
    params, x = sparse_golden.params("nsa.importance"), sparse_golden.arrays("nsa.importance")
    pattern = NSA(block=params["block"], kernel=params["l"], stride=params["stride"])
    scores = pattern.block_scores(jnp.log(x["p_cmp"])[:, None])[:, 0]
    at_blocks = scores[:, :: pattern.block // pattern.stride]
    np.testing.assert_allclose(jnp.exp(at_blocks), x["p_slc"], rtol=1e-5)


def dense_attention(q, k, v, visible):
    """Attention of one row and its weights [N, T, S]; 0 for tokens that see nothing."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("TNH,SNH->NTS", q, k) * q.shape[-1] ** -0.5
    weights = jnp.where(visible, jax.nn.softmax(jnp.where(visible, logits, -1e30), -1), 0)
    return jnp.einsum("NTS,SNH->TNH", weights, v), weights


def windows(length, pattern):
    """Whether a token is one of each window [W, S], also of incomplete ones; their last tokens."""
    kernel, stride = pattern.kernel or pattern.block, pattern.stride or pattern.block
    starts, at = np.arange(0, length, stride)[:, None], np.arange(length)
    return (at >= starts) & (at < starts + kernel), starts[:, 0] + kernel - 1


def dense_compressed(q, k, v, pattern):
    """The first branch of one row, and its weights [N, T, W]."""
    of_window, ends = windows(len(q), pattern)
    k, v = (jnp.einsum("WS,SKH->WKH", of_window, x) / of_window[0].sum() for x in (k, v))
    return dense_attention(q, k, v, ends <= np.arange(len(q))[:, None])


def dense_branches(q, k, v, is_read, pattern):
    """The three branches [T, N, H, 3] of a row whose tokens read the blocks [K, T, blocks]."""
    at = np.arange(len(q))
    is_read = np.repeat(np.repeat(is_read, q.shape[1] // len(is_read), axis=0), pattern.block, 2)
    past, near = at <= at[:, None], at > at[:, None] - pattern.window
    branches = [dense_compressed(q, k, v, pattern)[0]]
    for visible in (is_read[..., : len(q)] & past, near & past):
        branches.append(dense_attention(q, k, v, visible)[0])
    return jnp.stack(branches, -1)


def expected_choice(weights, kv_heads, pattern):
    """The blocks of each key head and token [K, T, blocks], and where the choice is clear."""
    of_window, _ = windows(weights.shape[1], pattern)
    blocks = np.arange(-(-weights.shape[1] // pattern.block))
    of_block = np.arange(weights.shape[1]) // pattern.block == blocks[:, None]
    p = weights.reshape(kv_heads, -1, *weights.shape[1:]).sum(1)
    scores = p @ (of_window.astype(float) @ of_block.T)  # by the number of shared tokens
    chosen = np.zeros(scores.shape, bool)
    clear = np.ones(scores.shape[:2], bool)
    for head, t in np.ndindex(*clear.shape):
        last = t // pattern.block
        chosen[head, t, [0, max(last - 1, 0), last]] = True
        order = sorted(range(1, last - 1), key=lambda j: (scores[head, t, j], j), reverse=True)
        count = pattern.top_k - 3
        chosen[head, t, order[:count]] = True
        if len(order) > count:
            least, next_best = scores[head, t, order[count - 1]], scores[head, t, order[count]]
            clear[head, t] = least == next_best or least > 1.01 * next_best
    return chosen, clear


@pytest.mark.parametrize(
    ("length", "fields", "heads", "kv_heads"),
    [
        (75, {"kernel": 4, "stride": 2}, 4, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (75, {}, 4, 2),
                (90, {"kernel": 20, "stride": 4, "window": 3}, 6, 2),  # longer than blocks
                (61, {"block": 6, "kernel": 3, "stride": 3}, 3, 3),
                (60, {"kernel": 80, "top_k": 5}, 4, 1),  # longer than the text
            )
        ),
    ],
)
def test_values_choices_and_gradients_are_those_of_dense_attention(length, fields, heads, kv_heads):
    """In float64, for windows that overlap, and others."""
    pattern = NSA(**({"block": 8, "top_k": 4, "window": 12} | fields))
    q, k, v = random_qkv(length, heads, kv_heads)
    rng = np.random.default_rng(1)
    gates, cotangent = (rng.normal(size=(1, length, heads, n)) for n in (3, q.shape[-1]))

    def run(*arrays):
        return (attend(*arrays, pattern) * cotangent).sum()

    is_read = np.asarray(chosen(q, k, pattern))
    got = jax.grad(run, (0, 1, 2, 3))(q, k, v, jnp.asarray(gates, jnp.float32))
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(x[0], np.float64)) for x in (q, k, v))
        weights = np.asarray(dense_compressed(q, k, v, pattern)[1])
        want, clear = expected_choice(weights, kv_heads, pattern)

        def loss(q, k, v, gates):
            branches = dense_branches(q, k, v, is_read, pattern)
            return (jnp.einsum("TNHR,TNR->TNH", branches, gates) * cotangent[0]).sum()

        expected = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, jnp.asarray(gates[0]))
        expected = [np.asarray(x) for x in expected]
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(is_read[clear], want[clear])
    for slope, x in zip(got, expected, strict=True):  # that of a gate is the value of its branch
        np.testing.assert_allclose(slope[0], x, rtol=1e-4, atol=2e-5)


def test_documents_that_share_a_row_have_the_values_of_each_alone():
    """Documents shorter than a window, too; in rows with padding, and in a row of their own."""
    pattern, lengths = OVERLAPPING, [3, 40, 1, 46]
    numbers = np.repeat([1, 2, 3, 4], lengths)
    segments = np.stack([numbers, *(np.where(numbers == n, n, 0) for n in range(1, 5))])
    q, k, v = (jnp.repeat(x, len(segments), axis=0) for x in random_qkv(90))
    gates = jnp.asarray(np.random.default_rng(1).normal(size=(1, 90, 4, 3)), jnp.float32)
    gates = jnp.repeat(gates, len(segments), axis=0)
    out = np.asarray(attend(q, k, v, gates, pattern, jnp.asarray(segments, jnp.int32)))
    alone = out[numbers, np.arange(90)]
    np.testing.assert_allclose(out[0], alone, rtol=1e-5, atol=2e-6)
    last = slice(44, 90)
    np.testing.assert_allclose(
        attend(*(x[:1, last] for x in (q, k, v, gates)), pattern)[0], out[0, last], atol=5e-6
    )


@pytest.mark.parametrize("length", [5, 8, 31, 32])
def test_the_branch_of_chosen_blocks_is_full_attention_in_short_texts(length):
    q, k, v = random_qkv(length)
    out = attend(q, k, v, only(1, q), SMALL)
    places = jnp.arange(length)[None]
    want = Causal().attend(q, k, v, AttentionMetadata(places, places))
    np.testing.assert_allclose(out, want, atol=2e-6)
    # One more block would not be read by all tokens.
    q, k, v = random_qkv(41)
    places = jnp.arange(41)[None]
    want = Causal().attend(q, k, v, AttentionMetadata(places, places))
    assert abs(attend(q, k, v, only(1, q), SMALL) - want)[0, -1].max() > 1e-3


def test_tokens_before_the_first_complete_block_have_no_compressed_keys():
    q, k, v = random_qkv(50)

    def loss(*arrays):
        return (attend(*arrays, only(0, q), SMALL) ** 2).sum()

    out = attend(q, k, v, only(0, q), SMALL)
    assert not out[:, :7].any() and (abs(out[:, 7:]).max((0, 2, 3)) > 0).all()
    # Token 7 sees one mean; the unfinished last block is not read.
    mean = np.repeat(np.asarray(v[0, :8]).mean(0), 2, axis=0)
    np.testing.assert_allclose(out[0, 7], mean, atol=1e-6)
    for slope in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v):
        assert np.isfinite(slope).all() and slope.any()
    _, dk, dv = jax.grad(loss, (0, 1, 2))(q, k, v)
    assert dk[:, :48].any() and dv[:, :48].any() and not dk[:, 48:].any() and not dv[:, 48:].any()


@BOTH
def test_every_branch_is_causal(pattern):
    q, k, v = random_qkv(60)
    for branch in range(3):
        before = np.asarray(attend(q, k, v, only(branch, q), pattern))
        for at in (30, 31, 32):
            moved = (x.at[:, at].add(1.0) for x in (q, k, v))
            after = np.asarray(attend(*moved, only(branch, q), pattern))
            np.testing.assert_array_equal(before[:, :at], after[:, :at])
            changes = branch != 0 or at == 31  # an unfinished window is no compressed key
            assert np.any(before[:, at] != after[:, at]) or not changes


@functools.cache
def decoder_params(pattern=SMALL, random=True):
    """With random gates, or those of the start."""
    init = jax.jit(Decoder(CONFIG.replace(pattern=pattern)).init)
    params = init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    if not random:
        return params
    flat, rng = flatten(params), np.random.default_rng(7)
    for path, x in flat.items():
        if "branch_gate" in path:
            flat[path] = jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32)
        elif "branch_scale" in path:
            flat[path] = jnp.asarray(rng.uniform(0.3, 1.5, x.shape), jnp.float32)
    return nest(flat)


def hidden(config, params, tokens):
    model = Decoder(config)
    return jax.jit(lambda params: model.apply({"params": params}, tokens).hidden)(params)


def test_a_dense_model_is_unchanged_at_the_start():
    params = decoder_params(random=False)
    dense = nest({p: x for p, x in flatten(params).items() if "/pattern/" not in p})
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 256, (2, 32)))
    want = hidden(CONFIG, dense, tokens)
    got = hidden(CONFIG.replace(pattern=SMALL), params, tokens)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_the_loss_of_the_model_trains_gates_from_the_start():
    params, config = decoder_params(random=False), CONFIG.replace(pattern=SMALL)
    model, tokens = Decoder(config), jnp.asarray(np.random.default_rng(3).integers(0, 256, (2, 60)))

    @jax.jit
    def slopes(params):
        return jax.grad(lambda p: jnp.sin(model.apply({"params": p}, tokens).hidden).sum())(params)

    gradients = flatten(slopes(params))
    scales = [x for path, x in gradients.items() if "branch_scale" in path]
    gates = [x for path, x in gradients.items() if "branch_gate" in path]
    assert scales and all((abs(x) > 0).all() for x in scales)
    assert gates and all(abs(x[..., 1]).max() > 0 for x in gates)
    gradients = flatten(slopes(decoder_params()))
    assert all(
        (abs(x).max((-3, -2)) > 0).all() for path, x in gradients.items() if "branch_gate" in path
    )


# The keys that are chosen are fewer than those in the cache, or more; the window is longer, too.
@pytest.mark.parametrize(
    "pattern",
    [
        SMALL,
        OVERLAPPING,
        NSA(block=8, top_k=3, window=100),
        *(
            pytest.param(NSA(block=8, **fields), marks=pytest.mark.slow)
            for fields in (
                {"top_k": 8, "window": 12},
                {"top_k": 3, "window": 1},
                {"top_k": 3, "window": 1, "kernel": 20, "stride": 4},
            )
        ),
    ],
    ids=str,
)
def test_tokens_read_one_by_one_equal_a_text_read_at_once(pattern):
    """From a cache, over borders of windows and blocks, in rows that begin after padding."""
    config = CONFIG.replace(pattern=pattern)
    check_steps(config, decoder_params(), BranchCache, [[5], [21, 30]])


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"kernel": 6, "stride": 2}, marks=pytest.mark.slow)]
)
def test_generation_equals_reading_the_text_again(fields):
    check_generation(sharp_lm(pattern=NSA(block=8, top_k=3, window=6, **fields)))


@MESHES
def test_eight_devices_have_the_values_and_gradients_of_one(mesh):
    check_devices(CONFIG.replace(pattern=SMALL), decoder_params(), mesh, first=17)


@pytest.mark.parametrize(("kind", "mass", "hit"), [("token", 0.75, 0.77), ("block", 0.96, 1.0)])
def test_a_needle_is_found_as_often_as_in_the_specification(kind, mass, hit):
    pattern, means = NSA(block=64, top_k=5), []
    for seed in (0, 1):
        q, k = sparse_golden.needle(seed, kind)
        arrays = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k))
        is_read = np.asarray(chosen(*arrays, pattern))[0]
        means.append(sparse_golden.recall(q, k, is_read, kind, pattern.block, rows=1))
    got = np.mean(means, 0)
    assert got[0] > mass - 0.04 and got[1] > hit - 0.04 and got[2] < 0.38 + 0.04


@pytest.mark.parametrize("pattern", [NSA(), NSA(kernel=32, stride=16)], ids=str)
def test_no_array_grows_with_the_square_of_the_text(pattern):
    length = 65_536

    def run(q, k, v, gates):
        places = jnp.arange(length)[None]
        metadata = AttentionMetadata(places, places, implementation="xla")
        return pattern.attend(q, k, v, with_gates(metadata, gates)).sum()

    shapes = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (4, 1, 1)]
    shapes.append(jax.ShapeDtypeStruct((1, length, 4, 3), jnp.float32))
    traced = jax.make_jaxpr(jax.grad(run, (0, 1, 2, 3)))(*shapes)
    # Copies of queries; T x T is 256 times as many numbers as the queries, T x T / block 4 times.
    assert largest_array(traced.jaxpr) <= 16 * length * 4 * 64


@pytest.mark.parametrize(("fields", "means"), [({}, 1), ({"kernel": 8, "stride": 4}, 4)])
def test_bytes_of_the_cache_are_counted(fields, means):
    """A block has `means` means of keys and of values."""
    pattern = NSA(block=16, top_k=3, window=4, **fields)
    config = preset("tiny").replace(num_layers=1, pattern=pattern)
    shape = LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, jnp.dtype("float32"))
    kind, slots = cache_lib.layer_caches(config)[0].fit(100, None)
    arrays = kind.arrays(shape, slots)
    assert arrays["means"].shape == (config.num_kv_heads, 7 * means, config.head_dim)
    assert arrays["value_means"].shape == arrays["means"].shape
    assert not isinstance(cache_lib.layer_caches(config)[0].fit(48, None)[0], BranchCache)
    plain = resources.cache_bytes(config.replace(pattern=Causal()), 100)
    each = 4 * config.num_kv_heads * config.head_dim
    assert resources.cache_bytes(config, 100) == plain + each * 2 * 7 * means
    # A generated token reads three blocks of the keys, four keys, and all means.
    assert resources.read_cache_bytes(config, 96) == each * 2 * (48 + 4 + 6 * means)
    assert kind.num_multiplied(96, 1) == 48 + 4 + 6 * means


@pytest.mark.parametrize("fields", [{}, {"kernel": 8, "stride": 4}, {"kernel": 4, "stride": 2}])
def test_passes_show_as_many_keys_as_the_branches_read(fields):
    """Up to two blocks: the own one is not whole, and the windows of near blocks are rounded."""
    pattern, at = NSA(block=8, top_k=4, window=16, **fields), np.arange(400)
    passes = pattern.passes(AttentionMetadata(at[None], at[None]))
    counts = sum(np.asarray(x.mask.element(at[:, None], at)).sum(1) for x in passes)
    ends = windows(400, pattern)[1]
    want = 4 * 8 + 16 + (ends <= at[:, None]).sum(1)
    assert (abs(counts - want)[120:] <= 2 * 8).all()


def test_wrong_input_names_the_way_out():
    with pytest.raises(InputError, match=r"pattern\.top_k=2 .*at least 3"):
        NSA(top_k=2)
    with pytest.raises(InputError, match=r"pattern\.kernel=24 must be a multiple of .*stride=16"):
        NSA(kernel=24, stride=16)
    with pytest.raises(InputError, match=r"pattern\.block=40 must be a multiple of .*stride=16"):
        NSA(block=40, kernel=32, stride=16)
    lm = sharp_lm()
    with pytest.raises(InputError, match=r"parameters of its own.*train.trainable=\[pattern\]"):
        lm.with_method(pattern=SMALL)
    with pytest.raises(InputError, match="exact=True"):
        BranchCache(SMALL, rotated=False).fit(64, None)
