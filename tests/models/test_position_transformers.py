"""Biases of the logits equal attention layers of transformers that are trained with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import AttentionMetadata, Bidirectional, Causal, Disentangled
from lcjax.models.decoder import BUCKETS, MAX_DISTANCE
from lcjax.rope.rotation import no_rotation
from pallas_kernels import Alibi, RelativeBias, alibi_slopes

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
HEADS, SIZE, T = 6, 16, 150  # farther than T5's last bucket begins
WIDTH = HEADS * SIZE
HIDDEN = np.random.default_rng(0).normal(size=(2, T, WIDTH)).astype(np.float32)


def attended(projections, out, bias, scale=1.0, pattern=Causal()):
    """Our attention between the projections [D, D] of a torch layer."""
    q, k, v = ((HIDDEN @ w.T).reshape(2, T, HEADS, SIZE) for w in projections)
    y = np.asarray(attend(pattern, np.float32(scale) * q, k, v, bias))
    return y.reshape(2, T, WIDTH) @ out.T


@functools.partial(jax.jit, static_argnums=0)
def attend(pattern, q, k, v, bias):
    at = jnp.arange(T)[None].repeat(2, 0)
    metadata = AttentionMetadata(
        at, at, rotation=no_rotation(), row_indices=(None, None), bias=bias
    )
    return pattern.attend(q, k, v, metadata)


def weight(linear):
    return linear.weight.detach().numpy()


def test_alibi_equals_the_attention_of_mpt():
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

    torch.manual_seed(0)
    layer = MptAttention(MptConfig(d_model=WIDTH, n_heads=HEADS), layer_idx=0).eval()
    hidden = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        want = layer(
            torch.from_numpy(HIDDEN), build_mpt_alibi_tensor(HEADS, T), attention_mask=hidden
        )[0].numpy()
    projections = np.split(weight(layer.Wqkv), 3)
    got = attended(projections, weight(layer.out_proj), Alibi(jnp.asarray(alibi_slopes(HEADS))))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def test_relative_biases_equal_the_attention_of_a_t5_decoder():
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    torch.manual_seed(0)
    config = T5Config(
        d_model=WIDTH, d_kv=SIZE, num_heads=HEADS, is_decoder=True, dropout_rate=0.0,
        relative_attention_num_buckets=BUCKETS, relative_attention_max_distance=MAX_DISTANCE,
    )  # fmt: skip
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    causal = torch.triu(torch.full((T, T), torch.finfo(torch.float32).min), 1)[None, None]
    with torch.no_grad():
        torch.nn.init.normal_(layer.relative_attention_bias.weight)
        want = layer(torch.from_numpy(HIDDEN), mask=causal)[0].numpy()
    table = weight(layer.relative_attention_bias)
    projections = [weight(x) for x in (layer.q, layer.k, layer.v)]
    # T5 does not divide logits by the square root of the head size.
    got = attended(projections, weight(layer.o), RelativeBias(table, MAX_DISTANCE), SIZE**0.5)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("buckets", "distance"), [(256, 512), (32, 128), (32, 100), (8, 300)])
def test_buckets_equal_those_of_deberta(buckets, distance):
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    away = np.arange(-1200, 1201)
    want = make_log_bucket_position(torch.from_numpy(away), buckets, distance).numpy()
    bias = Disentangled(*2 * [np.zeros((2 * buckets, 1, 1), np.float32)], distance)
    got = jax.jit(Disentangled.buckets)(bias, away)
    np.testing.assert_array_equal(got, np.clip(want + buckets, 0, 2 * buckets - 1))


def test_disentangled_attention_equals_that_of_deberta():
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    torch.manual_seed(0)
    config = DebertaV2Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, relative_attention=True, position_buckets=16,
        max_relative_positions=64, pos_att_type=["c2p", "p2c"], share_att_key=True,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    layer = DisentangledSelfAttention(config).eval()
    rows = np.random.default_rng(1).normal(size=(32, WIDTH)).astype(np.float32)
    with torch.no_grad():
        for linear in (layer.query_proj, layer.key_proj, layer.value_proj):
            linear.bias.zero_()
        mask = torch.ones(2, 1, T, T, dtype=torch.bool)
        hidden, table = torch.from_numpy(HIDDEN), torch.from_numpy(rows)
        want = layer(hidden, mask, rel_embeddings=table)[0].numpy()
    projections = [weight(x) for x in (layer.query_proj, layer.key_proj, layer.value_proj)]
    queries, keys = ((rows @ w.T).reshape(32, HEADS, SIZE).swapaxes(1, 2) for w in projections[:2])
    bias = Disentangled(keys, queries, 64)
    got = attended(projections, np.eye(WIDTH), bias, pattern=Bidirectional())
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
