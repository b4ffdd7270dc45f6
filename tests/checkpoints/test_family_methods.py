"""Every model family under every RoPE method: decoding equals prefill, and exports of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope_examples import rope_examples

from lcjax import attention, rope
from lcjax.checkpoints import ByteTokenizer, config_from_hf, load_config, save_hf
from lcjax.checkpoints.families import FAMILIES
from lcjax.models import Decoder
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import random_params

LENGTH = 40
SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=16,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=24, sliding_window=12,
    use_sliding_window=True, max_window_layers=2, num_local_experts=5, num_experts=5,
    num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20,
    intermediate_size_mlp=64, interleave_moe_layer_step=2, attention_chunk_size=12, floor_scale=8,
    hidden_size_per_layer_input=0, global_head_dim=16,
)  # fmt: skip
HALF = tuple(1.0 + 0.1 * i for i in range(8))
METHODS = {
    "linear, causal": (rope.Linear(factor=2.0), attention.Causal()),
    "ntk, sliding": (rope.NTK(alpha=2.0), attention.Sliding(window=9)),
    "dynamic_ntk, streaming": (
        rope.DynamicNTK(factor=2.0),
        attention.Streaming(sinks=2, recent=10),
    ),
    "yarn, lm_infinite": (rope.Yarn(factor=2.0), attention.LMInfinite(window=9, sinks=2)),
    "longrope, self_extend": (
        rope.LongRope(short_factor=HALF, long_factor=HALF[::-1], factor=2.0),
        attention.SelfExtend(window=8, group=2),
    ),
    "llama3, dual_chunk": (
        rope.Llama3(factor=2.0, original_length=24),
        attention.DualChunk(chunk=12, local=4),
    ),
    "none, causal": (rope.NoRotation(), attention.Causal()),
    "its own": (None, None),
}
_LISTED = {type(position) for position, _ in METHODS.values()}
METHODS |= {
    f"{name}, causal": (example, attention.Causal())
    for name, example in rope_examples().items()
    if type(example) not in _LISTED
}


def model(family, method):
    two = {"num_hidden_layers": 2} if family == "gemma2" else {}  # its two kinds of layers
    config = config_from_hf(SIZES | two | {"model_type": family})
    position, pattern = METHODS[method]
    if position is not None:
        is_partial = FAMILIES[family].rotary_fraction is not None
        sizes = {"rotary_fraction": 1.0} if is_partial else {}
        config = config.replace(
            rope=position.resolve(theta=10_000.0, length=config.max_length),
            pattern=pattern,
            layers=(),
            num_layers=2,  # equal ones
            **sizes,
        )
    return config.replace(scan_layers=False).for_inference()


@pytest.mark.slow_except("qwen3-yarn, lm_infinite", "gemma2-its own")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_equals_prefill(family, method):
    config = model(family, method)
    decoder, params = Decoder(config), random_params(config, 0)
    rotation = config.rotation(LENGTH, params.get("rope"))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, LENGTH)), jnp.int32)

    @jax.jit
    def read(tokens, cache):
        output = decoder.apply({"params": params}, tokens, cache=cache, rotation=rotation)
        hidden, cache = output.hidden, output.cache
        return decoder.apply({"params": params}, hidden, method="logits"), cache

    whole, _ = read(tokens, None)
    cache, parts = cache_lib.create(config, 2, LENGTH, chunk=16), []
    for start, stop in ((0, 16), (16, 32), *((i, i + 1) for i in range(32, LENGTH))):
        logits, cache = read(tokens[:, start:stop], cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-4)
    assert np.isfinite(whole).all() and np.std(whole) > 1e-3


TRAINED, EXTENDED = SIZES["max_position_embeddings"], 2 * SIZES["max_position_embeddings"]
# A method, `max_position_embeddings` of its export, and the tokens that transformers reads with it.
EXPORTS = {
    "linear": (rope.Linear(factor=2.0), EXTENDED, EXTENDED),
    "ntk": (rope.NTK(alpha=2.0), EXTENDED, EXTENDED),
    "dynamic_ntk": (rope.DynamicNTK(factor=2.0), TRAINED, EXTENDED),  # its formula reads the key
    "dynamic_ntk, trained": (rope.DynamicNTK(factor=1.5, min_length=40), 40, 40),
    "yarn": (rope.Yarn(factor=2.0), EXTENDED, EXTENDED),
    "yarn, by turns": (rope.Yarn(factor=2.0, ramp="frequency"), EXTENDED, EXTENDED),
    "longrope": (
        rope.LongRope(short_factor=HALF, long_factor=HALF[::-1], factor=2.0), EXTENDED, EXTENDED
    ),
    "llama3": (rope.Llama3(factor=2.0), EXTENDED, EXTENDED),
    "e2_llm": (rope.E2LLM(factor=2.0), EXTENDED, EXTENDED),
    "e2_llm, by length": (rope.E2LLM(), TRAINED, TRAINED),  # plain in transformers
    "clex": (rope.Clex(max_factor=2), TRAINED, TRAINED),
}  # fmt: skip


@pytest.mark.slow_except("llama-yarn", "llama-dynamic_ntk", "gemma3_text-linear")
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in EXPORTS),
        *(("olmo3", "yarn"), ("gemma3_text", "linear"), ("phi3", "longrope"), ("phi", "ntk")),
        *(("smollm3", "llama3"), ("qwen3_moe", "dynamic_ntk")),
    ],
)
@pytest.mark.filterwarnings("ignore:.*as plain rope")
def test_exports_announce_the_length_of_their_method(tmp_path, family, method):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    position, stated, length = EXPORTS[method]
    config = config_from_hf(SIZES | {"model_type": family, "vocab_size": 264})
    config = config.replace(rope=position.resolve(theta=10_000.0, length=config.max_length))
    params = random_params(config, 0)
    save_hf(tmp_path, params, config, ByteTokenizer())
    assert load_config(tmp_path) == config

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.config.max_position_embeddings == stated
    limit = transformers.AutoTokenizer.from_pretrained(tmp_path).model_max_length
    assert limit == length if length > TRAINED else limit > 10**9
    tokens = np.random.default_rng(0).integers(0, 96, (1, length))
    decoder, rotation = Decoder(config), config.rotation(length, params.get("rope"))

    @jax.jit
    def logits(params, tokens):
        hidden = decoder.apply({"params": params}, tokens, rotation=rotation).hidden
        return decoder.apply({"params": params}, hidden, method="logits")

    ours = logits(params, tokens)
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(torch.from_numpy(tokens)).logits, atol=1e-4)
