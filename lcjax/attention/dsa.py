"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, sec. 2.1) on grouped-query models.

Letters: I index heads, J channels of an index head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lcjax.attention.base import Features, Parameter, Pattern
from lcjax.attention.chosen_keys import ChosenKeys, Entries
from lcjax.attention.indexer import index_rotation
from pallas_kernels import gather

_EPSILON = 1e-6  # of the norm of index keys


@Pattern.register_subclass("dsa")
@dataclass(frozen=True)
class DSA(ChosenKeys):
    """A token sees the `top_k` earlier tokens that an indexer scores highest, itself included.

    The indexer has `heads` small query heads and one key head, whose keys a cache keeps. The score
    of a key for a query is the sum over index heads of w relu(q k), in float32, with a weight w of
    each query and head (eq. 1). All attention heads read the keys with the `top_k` highest scores
    in one softmax. Scores that differ by no more than their rounding error count as equal, and of
    equal keys the later ones are read. A text of up to `top_k` tokens has full attention, so a
    dense model is unchanged until its texts are longer.

    An index head multiplies all pairs of tokens, so the indexer must be small. DeepSeek-V3.2 has 64
    heads of 128 channels beside 128 attention heads; 16 heads of 64 cost an eighth of the logits
    and values of Llama-3-8B.

    DeepSeek's indexer computes queries from the latent vector of its attention; here they come from
    the hidden states, as keys and weights do. Index queries and keys are rotated as those of
    attention, in their first channels; with fewer channels, by some of the frequencies.

    Training has two stages. With `dense`, attention is full, and the indexer learns the mean of all
    heads' probabilities (train.trainable=[pattern]); the paper takes 2.1 billion tokens. Then
    `dense` is false and all weights are trained: the model by its own loss, the indexer by the
    divergence over the chosen keys alone (eq. 3 and 4). Neither loss has a gradient for the other
    part, since the indexer reads hidden states without a gradient.
    """

    examples = (
        {"heads": 2, "head_dim": 16, "top_k": 24},
        {"heads": 3, "head_dim": 16, "top_k": 2},
    )

    @property
    def parameters(self):
        names = functools.partial("self_attn.indexer.{}".format)
        return {
            "index_query": Parameter("DIJ", names("wq_b.weight"), "IJ,D"),
            "index_key": Parameter("DJ", names("wk.weight"), "J,D"),
            "index_norm_scale": Parameter("J", names("k_norm.weight"), "J", "ones"),
            "index_norm_bias": Parameter("J", names("k_norm.bias"), "J", "zeros"),
            "index_weight": Parameter("DI", names("weights_proj.weight"), "I,D"),
        }

    def features(self, parameters, x, q, k, metadata):
        rotation = index_rotation(metadata.rotation, self.head_dim)
        x = jax.lax.stop_gradient(x)
        queries = gather.einsum("BTD,DIJ->BTIJ", x, parameters["index_query"]).astype(x.dtype)
        keys = gather.einsum("BTD,DJ->BTJ", x, parameters["index_key"])
        keys -= keys.mean(-1, keepdims=True)
        keys *= jax.lax.rsqrt(jnp.square(keys).mean(-1, keepdims=True) + _EPSILON)
        scale, bias = (parameters[f"index_norm_{name}"] for name in ("scale", "bias"))
        keys = (keys * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
        rotate = functools.partial(rotation.rotate, positions=metadata.q_positions)
        weights = gather.einsum("BTD,DI->BTI", x, parameters["index_weight"])
        weights *= (self.heads * self.head_dim) ** -0.5
        keys = rotate(keys[:, :, None])
        return Features({"index": rotate(queries), "weight": weights}, {"index": keys}, {})

    def entries(self, keys, metadata):
        vectors = metadata.features.keys["index"][:, :, 0]
        return Entries(vectors, keys.index, keys.segments)
