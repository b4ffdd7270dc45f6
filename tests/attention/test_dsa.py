"""DSA: its indexer, its choice and its divergence, against the authors' numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_golden as golden
from chosen_support import check_generation, largest_array
from tiny_lm import sharp_lm

from lcjax.attention import DSA, AttentionMetadata, chosen_keys
from lcjax.attention.base import Features
from lcjax.errors import InputError
from lcjax.models import LayerKind, preset
from lcjax.rope import Rotation
from pallas_kernels import gather

CONFIG = preset("tiny").replace(num_layers=2, num_heads=4, num_kv_heads=2)
SPARSE = DSA(heads=3, head_dim=CONFIG.head_dim, top_k=20)


def case(name):
    """Inputs, metadata with index features, and arrays of a golden case."""
    params, x = golden.params(name), golden.arrays(name)
    metadata = golden.metadata(params)
    qi = jnp.asarray(x["qi"]).swapaxes(1, 2)
    weight = jnp.asarray(x["w"])
    if name.startswith("dsa.attend"):
        weight *= params["index_dim"] ** -0.5
    features = Features(
        {"index": qi, "weight": weight}, {"index": jnp.asarray(x["ki"])[:, :, None]}, {}
    )
    rows = len(qi)
    metadata = metadata.replace(
        q_positions=jnp.repeat(metadata.q_positions, rows, 0),
        k_positions=jnp.repeat(metadata.k_positions, rows, 0),
        features=features,
    )
    pattern = DSA(params.get("index_heads", 8), params["index_dim"], params["topk"] or 10**6)
    return pattern, metadata, x


@pytest.fixture
def no_ties(monkeypatch):
    """The authors' code chooses among scores that are nearly equal, too."""
    monkeypatch.setattr(gather, "TIE", 2.0**-22)


@pytest.mark.parametrize("name", ["dsa.attend_gqa", "dsa.attend_packed"])
def test_attention_and_gradients_are_those_of_the_authors(name, no_ties):
    pattern, metadata, x = case(name)
    attend = jax.jit(lambda q, k, v: pattern.attend(q, k, v, metadata))
    out, backward = jax.vjp(attend, *(jnp.asarray(x[n]) for n in "qkv"))
    np.testing.assert_allclose(out, x["out"], rtol=1e-5, atol=2e-6)
    for gradient, n in zip(backward(jnp.asarray(x["cotangent"])), "qkv"):
        np.testing.assert_allclose(gradient, x[f"d{n}"], rtol=1e-5, atol=5e-6)


def divergence(features, q, k, visible, epsilon=0.0):
    """The mean divergence from the probabilities of all heads, with arrays [B, T, S]."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    logits = jnp.einsum("BTNH,BSNH->BNTS", q, k, precision="highest") * q.shape[3] ** -0.5
    teacher = jax.nn.softmax(jnp.where(visible[:, None], logits, -jnp.inf), -1).mean(1)
    keys = features.keys["index"][:, :, 0]
    products = jnp.einsum("BTIJ,BSJ->BTIS", features.queries["index"], keys, precision="highest")
    scores = (jax.nn.relu(products) * features.queries["weight"][..., None]).sum(2)
    scores = jnp.where(visible, scores, -1e30)
    if epsilon:
        apart = jnp.log(teacher + epsilon) - jnp.log(jax.nn.softmax(scores, -1) + epsilon)
    else:
        apart = jnp.log(jnp.maximum(teacher, 1e-37)) - jax.nn.log_softmax(scores, -1)
    return jnp.where(visible, teacher * apart, 0).sum(-1).mean()


@pytest.mark.parametrize("name", ["dsa.kl_dense", "dsa.kl_dense_packed", "dsa.kl_sparse"])
def test_divergence_and_gradients_are_those_of_maxtext(name, no_ties):
    """MaxText adds 1e-8 to both probabilities, which hides a student that is far off."""
    pattern, metadata, x = case(name)
    q, k = jnp.asarray(x["q"]), jnp.asarray(x["k"])
    visible = metadata.k_order[..., None, :] <= metadata.q_order[..., None]
    if metadata.q_segments is not None:
        visible &= metadata.q_segments[:, :, None] == metadata.k_segments[:, None]
    visible = (
        jnp.asarray(x["chosen"])
        if "chosen" in x
        else jnp.broadcast_to(visible, (len(q), *visible.shape[-2:]))
    )

    def ours(features):
        return pattern.divergence(q, k, metadata.replace(features=features)).mean()

    def theirs(features, epsilon=0.0):
        return divergence(features, q, k, visible, epsilon)

    values = [
        jax.jit(jax.value_and_grad(functools.partial(f)))(metadata.features)
        for f in (ours, theirs, functools.partial(theirs, epsilon=1e-8))
    ]
    (mine, gradient), (want, other), (published, published_gradient) = values
    np.testing.assert_allclose(published, x["loss"], rtol=1e-5)
    np.testing.assert_allclose(
        published_gradient.keys["index"][:, :, 0], x["dki"], rtol=1e-4, atol=1e-7
    )
    dqi, dw = (published_gradient.queries[name] for name in ("index", "weight"))
    np.testing.assert_allclose(dqi.swapaxes(1, 2), x["dqi"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(dw, x["dw"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(mine, want, rtol=1e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradient, other
    )


@pytest.mark.parametrize("name", ["dsa.indexer_deepseek", "dsa.indexer_glm"])
def test_scores_and_choices_are_those_of_transformers(name, no_ties):
    """Queries come from a latent vector there: here from channels beside the hidden states."""
    params, x = golden.params(name), golden.arrays(name)
    heads, size, rotary = params["heads"], params["index_dim"], params["rope_dim"]
    order = np.arange(size)
    if params["interleaved"]:
        order[:rotary] = np.arange(rotary).reshape(-1, 2).T.reshape(-1)
    hidden = np.concatenate([x["hidden"], x["q_latent"]], -1)
    latent = x["q_latent"].shape[-1]
    query = np.pad(x["wq"], [(x["hidden"].shape[-1], 0), (0, 0)]).reshape(-1, heads, size)
    parameters = {
        "index_query": query[..., order],
        "index_key": np.pad(x["wk"], [(0, latent), (0, 0)])[:, order],
        "index_norm_scale": x["norm_scale"][order],
        "index_norm_bias": x["norm_bias"][order],
        "index_weight": np.pad(x["ww"], [(0, latent), (0, 0)]),
    }
    parameters = {name: jnp.asarray(array) for name, array in parameters.items()}
    pattern = DSA(heads, size, params["topk"])
    frequencies = params["rope_base"] ** -(np.arange(0, rotary, 2) / rotary)
    metadata = golden.metadata({"cu_seqlens": [0, hidden.shape[1]]})
    metadata = metadata.replace(rotation=Rotation(jnp.asarray(frequencies, jnp.float32)))
    features = pattern.features(parameters, jnp.asarray(hidden), None, None, metadata)
    keys = features.keys["index"][:, :, 0]
    products = jnp.einsum("BTIJ,BSJ->BTIS", features.queries["index"], keys, precision="highest")
    scores = (jax.nn.relu(products) * features.queries["weight"][..., None]).sum(2)
    causal = np.tril(np.ones(scores.shape[1:], bool))
    np.testing.assert_allclose(
        np.where(causal, scores, 0), np.where(causal, x["scores"], 0), rtol=1e-5, atol=2e-6
    )
    ids = jax.lax.top_k(jnp.where(causal, scores, -jnp.inf), params["topk"])[1]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, np.asarray(ids), True, -1)
    np.testing.assert_array_equal(chosen & causal, x["chosen"] & causal)


def test_generation_equals_reading_the_text_again():
    check_generation(sharp_lm(pattern=DSA(heads=2, head_dim=16, top_k=16)))


def test_wrong_input_names_the_way_out():
    lm = sharp_lm()
    with pytest.raises(InputError, match=r"parameters of its own.*train.trainable=\[pattern\]"):
        lm.with_method(pattern=SPARSE)
    trained = sharp_lm(pattern=SPARSE)
    with pytest.raises(InputError, match=r"index_key of shape \(64, 16\), and these fields need"):
        trained.with_method(pattern=DSA(heads=3, head_dim=12, top_k=20))
    kinds = LayerKind(), LayerKind(keys_of=0)
    with pytest.raises(InputError, match=r"type=dsa has parameters .* beside layers with keys_of"):
        CONFIG.replace(pattern=SPARSE, layers=kinds)


def test_no_array_grows_with_the_square_of_the_text():
    length, pattern = 131_072, DSA(heads=4, head_dim=32, top_k=2048)

    def run(features, q, k):
        places = jnp.arange(length)[None]
        metadata = AttentionMetadata(places, places, features=features)
        return pattern.attend(q, k, k, metadata).sum() + pattern.divergence(q, k, metadata).sum()

    shapes = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.float32) for n in (4, 1)]
    features = Features(
        {
            "index": shapes[0].update(shape=(1, length, 4, 32)),
            "weight": shapes[0].update(shape=(1, length, 4)),
        },
        {"index": shapes[1].update(shape=(1, length, 1, 32))},
        {},
    )
    traced = jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(features, *shapes)
    assert largest_array(traced.jaxpr) <= 4 * gather.BUDGET  # T x T has 1,024 times as many numbers


def test_blocks_of_keys_and_tiles_of_queries_change_nothing(monkeypatch):
    rng, pattern = np.random.default_rng(3), DSA(heads=2, head_dim=8, top_k=20)
    metadata = golden.metadata({"cu_seqlens": [0, 140, 300]})
    sizes = [(4, 16), (2, 16), (2, 16), (2, 8), (2,), (1, 8)]
    q, k, v, *rest = (jnp.asarray(rng.normal(size=(1, 300, *x)), jnp.float32) for x in sizes)
    features = Features({"index": rest[0], "weight": rest[1]}, {"index": rest[2]}, {})

    def run(q, k, v, features):
        with_features = metadata.replace(features=features)
        out = pattern.attend(q, k, v, with_features)
        return (out * q).sum() + pattern.divergence(q, k, with_features).sum()

    def results():
        gradient = jax.jit(jax.value_and_grad(run, (0, 1, 2, 3)))
        return jax.tree.leaves(gradient(q, k, v, features))

    want = results()
    monkeypatch.setattr(gather, "BUDGET", 7 * 300)  # tiles of 7 queries
    monkeypatch.setattr(chosen_keys, "_BLOCK", 1)  # blocks of 128 keys
    for found, expected in zip(results(), want, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_bfloat16_are_added_in_float32(monkeypatch):
    monkeypatch.setattr(gather, "BUDGET", 1)  # tiles of one query
    rng, pattern = np.random.default_rng(4), DSA(heads=2, head_dim=8, top_k=100)
    metadata = golden.metadata({"cu_seqlens": [0, 256]})
    sizes = [(2, 16), (1, 16), (1, 16), (2, 8), (2,), (1, 8)]
    arrays = [jnp.asarray(rng.normal(size=(1, 256, *x)), jnp.bfloat16) for x in sizes]

    def gradients(dtype):
        def run(q, k, v, index, weight, keys):
            features = Features({"index": index, "weight": weight}, {"index": keys}, {})
            return pattern.attend(q, k, v, metadata.replace(features=features)).sum()

        v, *_ = jax.jit(jax.grad(run, (2,)))(*(x.astype(dtype) for x in arrays))
        return np.asarray(v, np.float32)

    want = gradients(jnp.float32)
    assert np.linalg.norm(gradients(jnp.bfloat16) - want) < 0.01 * np.linalg.norm(want)


def test_few_queries_of_a_long_cache_hold_no_number_for_each_of_its_keys():
    pattern, q, k = DSA(heads=4, head_dim=32, top_k=64), (1, 2000, 4, 64), (1, 131_072, 1, 64)

    def run(q, k, index, weight, keys):
        at = jnp.arange(k.shape[1])[None]
        metadata = AttentionMetadata(
            at[:, -2000:], at, q_index=at[:, -2000:], k_index=at,
            features=Features({"index": index, "weight": weight}, {"index": keys}, {}),
        )  # fmt: skip
        return pattern.attend(q, k, k, metadata)

    shapes = (q, k, (1, 2000, 4, 32), (1, 2000, 4), (1, 131_072, 1, 32))
    traced = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes))
    assert largest_array(traced.jaxpr) <= 4 * gather.BUDGET
