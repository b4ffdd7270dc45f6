"""What holds for every pattern whose queries choose keys: caches, devices and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_lm import generated, ids

from lcjax.generation.sampling import Sampling
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings

CONFIG = preset("tiny").replace(num_layers=2, num_heads=4, num_kv_heads=2)
MESHES = pytest.mark.parametrize(
    "mesh",
    [
        Mesh(2, 2, 2, 1),
        *(pytest.param(x, marks=pytest.mark.slow) for x in (Mesh(1, 1, 8, 1), Mesh(1, 4, 2, 1))),
    ],
)


def check_steps(config, params, kind, splits):
    """A text that is read in parts, by a cache of `kind`, equals one that is read at once.

    Each of `splits` has the ends of the first parts; the tokens after them are read one by one. A
    row begins after padding.
    """
    length, padding = 70, 5
    tokens = np.random.default_rng(3).integers(0, 256, (2, length))
    segments = np.ones((2, length), np.int32)
    segments[1, :padding] = 0
    positions = np.maximum(np.cumsum(segments, 1) - 1, 0)
    model, real = Decoder(config), segments != 0

    @jax.jit
    def read(tokens, segments, positions, cache):
        options = {"segments": segments, "positions": positions, "cache": cache}
        output = model.apply({"params": params}, tokens, **options)
        return output.hidden, output.cache

    want = read(tokens, segments, positions, None)[0]
    for split in splits:
        ends = [*split, *range(split[-1] + 1, length + 1)]
        cache = cache_lib.create(config, 2, length, chunk=21)
        assert type(cache.kinds[0]) is kind
        outs = []
        for start, end in zip([0, *ends], ends):
            part = (x[:, start:end] for x in (tokens, segments, positions))
            out, cache = read(*part, cache)
            outs.append(out)
        np.testing.assert_allclose(np.concatenate(outs, 1)[real], want[real], rtol=0, atol=5e-5)


def check_generation(lm):
    """Generated tokens are those that follow if the text is read again up to the middle of them."""
    prompts = [ids(1, 45), ids(2, 30)]
    written = generated(lm, prompts, Sampling(max_new_tokens=12, min_new_tokens=12))
    longer = [prompt + new[:6] for prompt, new in zip(prompts, written, strict=True)]
    again = generated(lm, longer, Sampling(max_new_tokens=6, min_new_tokens=6))
    assert again == [new[6:] for new in written]


def check_devices(config, params, mesh, first):
    """Eight devices compute what one computes: two documents a row, of which one has `first`."""
    devices = make_mesh(mesh)
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 256, (2, 64)))
    segments = jnp.asarray(np.repeat([1, 2], [first, 64 - first])[None].repeat(2, 0), jnp.int32)
    weights = np.random.default_rng(6).normal(size=(2, 64, config.width)).astype(np.float32)

    def gradients(model, params):
        def loss(params):
            hidden = model.apply({"params": params}, tokens, segments=segments).hidden
            return (hidden * weights).sum(), hidden

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    want = gradients(Decoder(config), params)
    params = jax.device_put(params, param_shardings(devices, params))
    got = gradients(Decoder(config, devices), params)

    def compare(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=5e-6 * np.abs(y).max())

    jax.tree.map(compare, got, want)


def largest_array(jaxpr) -> int:
    """The most numbers of an array in a traced program, also inside of loops and calls."""
    sizes = [x.aval.size for equation in jaxpr.eqns for x in equation.outvars]
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                sizes.append(largest_array(inner))
    return max(sizes, default=0)
