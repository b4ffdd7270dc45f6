"""The training form of DuoAttention, against the authors' mask."""

import jax
import jax.numpy as jnp
import numpy as np
import sparse_golden as golden

from lcjax.attention.base import Features
from lcjax.attention.head_gates import HEAD_GATE, GatedHeads


def test_the_mix_and_the_gradient_of_gates_are_those_of_the_authors():
    params, x = golden.params("duo.mix"), golden.arrays("duo.mix")
    pattern = GatedHeads(params["sink"], params["recent"])
    metadata = golden.metadata({"cu_seqlens": [0, x["q"].shape[1]]})
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")

    def mix(gates):
        features = Features({}, {}, {HEAD_GATE: gates})
        return pattern.attend(q, k, v, metadata.replace(features=features))

    streaming = jax.jit(mix)(jnp.zeros(len(x["alpha"])))
    np.testing.assert_allclose(streaming, x["streaming"].swapaxes(1, 2), rtol=1e-5, atol=1e-5)
    out, backward = jax.vjp(mix, jnp.asarray(x["alpha"]))
    np.testing.assert_allclose(out, x["out"], rtol=1e-5, atol=1e-5)
    (slopes,) = backward(jnp.asarray(x["cotangent"]))
    np.testing.assert_allclose(slopes, x["dalpha"], rtol=1e-4, atol=1e-5)
