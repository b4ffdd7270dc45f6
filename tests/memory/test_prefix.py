"""Activation Beacon and AutoCompressor against their formulas, and what holds for both."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_support import assert_close
from tiny_lm import text
from window_oracle import Llama, with_beacons, with_summaries

from lcjax.attention import Sliding
from lcjax.checkpoints.build import ModelSection, build, model_config
from lcjax.cost.resources import parameter_shapes
from lcjax.errors import InputError
from lcjax.memory import AutoCompressorSection, Beacon, BeaconSection
from lcjax.models import Decoder, preset, unstack_layers
from lcjax.models import cache as cache_lib
from lcjax.rope import DynamicNTK
from lcjax.training.train_config import matcher
from lcjax.tree import flatten, nest

pytestmark = pytest.mark.usefixtures("exact_products")

BEACON = BeaconSection(chunk=8, ratio=4, ratios=())
SUMMARY = AutoCompressorSection(chunk=8, summary=3)
BOTH = pytest.mark.parametrize("section", [BEACON, SUMMARY], ids=["beacon", "auto_compressor"])

TOKENS, CHUNKS = text(1, 3, 10), text(2, 3, 3, 8)
# Text anywhere in a chunk, whole chunks, none; the last row has no context at all.
MASK = np.ones((3, 3, 8), bool)
MASK[0, 0, :5] = MASK[0, 2, 6:] = MASK[1, 1] = MASK[1, 2, 2:5] = MASK[2] = False


@functools.cache
def made(section):
    """A model whose memory has begun, and its parameters with some noise, as if it had learned."""
    model, params, _ = build(ModelSection(preset="tiny", memory=section))
    leaves, kinds = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    leaves = [x + 0.1 * rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    return model, jax.tree.unflatten(kinds, leaves)


@functools.partial(jax.jit, static_argnums=0)
def encoded(model, params, chunks, mask, options):
    return model.apply({"params": params}, chunks, mask, method="encode", **options)


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, tokens, memory=None, cache=None):
    """Logits [B, T, V], and the cache if there is one."""
    output = model.apply({"params": params}, tokens, memory=memory, cache=cache)
    hidden, cache = output.hidden, output.cache
    return model.apply({"params": params}, hidden, method="logits"), cache


def by_hand(section, model, params, row, ratios=None):
    """What the formulas say of a row, whose windows are what its mask shows."""
    oracle = Llama(jax.tree.map(np.asarray, params), model.config)
    shown = [chunk[there] for chunk, there in zip(CHUNKS[row], MASK[row], strict=True)]
    if isinstance(section, BeaconSection):
        ratios = [section.ratio] * 3 if ratios is None else ratios
        kept = [(chunk, ratio) for chunk, ratio in zip(shown, ratios, strict=True) if len(chunk)]
        windows, ratios = zip(*kept, strict=True) if kept else ((), ())
        return with_beacons(oracle, windows, TOKENS[row], ratios)[0]
    return with_summaries(oracle, [chunk for chunk in shown if len(chunk)], TOKENS[row])


@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [BEACON, dataclasses.replace(BEACON, ratio=0), SUMMARY],
    ids=["beacon", "raw", "auto_compressor"],
)
def test_windows_of_any_length_equal_the_formulas_wherever_padding_is(section):
    model, params = made(section)
    memory = encoded(model, params, CHUNKS, MASK, {})
    found, _ = read(model, params, TOKENS, memory)
    for row in range(3):
        assert_close(found[row], by_hand(section, model, params, row))
    plain, _ = read(model, params, TOKENS)
    np.testing.assert_array_equal(found[2], plain[2])  # the row without a context
    assert np.abs(found - plain).max((1, 2))[:2].min() > 0.01, "it does listen"


@pytest.mark.slow
def test_windows_that_are_not_condensed_are_the_decoder_over_the_whole_text():
    section = dataclasses.replace(BEACON, ratio=0)
    model, params = made(section)
    memory = encoded(model, params, CHUNKS, np.ones_like(MASK), {})
    whole = np.concatenate([CHUNKS.reshape(3, -1), TOKENS], 1)
    wanted, _ = read(model, params, whole)
    assert_close(read(model, params, TOKENS, memory)[0], wanted[:, 24:])


@BOTH
def test_without_a_context_the_model_is_its_base_bit_for_bit(section):
    model, params = made(section)
    base = Decoder(model.config.replace(memory=None))
    bare = {name: tree for name, tree in params.items() if name != "encoder"}
    bare["layers"] = dict(params["layers"], attention=dict(params["layers"]["attention"]))
    bare["layers"]["attention"].pop("memory", None)
    np.testing.assert_array_equal(read(model, params, TOKENS)[0], read(base, bare, TOKENS)[0])


@pytest.mark.slow
def test_a_cache_behind_a_memory_is_filled_with_the_same_numbers_by_layers_kept_apart():
    model, params = made(BEACON)
    memory = encoded(model, params, CHUNKS, MASK, {})
    wanted, _ = read(model, params, TOKENS, memory)
    config = model.config.replace(scan_layers=False)
    apart, params = Decoder(config), unstack_layers(params, config)
    cache, found = cache_lib.create(config, 3, 16), []
    for start, stop in ((0, 8), (8, 9), (9, 10)):
        logits, cache = read(apart, params, TOKENS[:, start:stop], memory, cache)
        found.append(logits)
    assert_close(jnp.concatenate(found, 1), wanted)


@pytest.mark.slow
@BOTH
def test_gradients_flow_through_all_windows_as_through_one_after_the_other(section):
    model, params = made(section)

    def loss(own, scanned):
        full = merged(params, own)
        if scanned:
            memory = model.apply({"params": full}, CHUNKS, MASK, method="encode")
        else:
            memory = None
            for number in range(3):
                part = CHUNKS[:, number : number + 1], MASK[:, number : number + 1]
                new = model.apply({"params": full}, *part, method="encode", after=memory)
                memory = new if memory is None else jax.tree.map(behind, memory, new)
        hidden = model.apply({"params": full}, TOKENS, memory=memory).hidden
        return (hidden * jnp.cos(jnp.arange(hidden.size)).reshape(hidden.shape)).sum()

    own = {path: x for path, x in flatten(params).items() if matcher(("memory",), "")(path)}
    (one, first), (other, second) = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(own, scanned)
        for scanned in (True, False)
    )
    assert_close(one, other, 1e-4)
    for path, grad in first.items():
        assert np.abs(grad).max() > 1e-3, path
        assert_close(grad, second[path], 1e-5 * np.abs(grad).max())


@functools.partial(jax.jit, static_argnums=0)
def slope(model, params, own, said, stop=None):
    """By the summary tokens `own`, of what window `said` of four says, the text being the last.

    Windows before `stop` are stopped by hand; None: as the memory does it.
    """

    def loss(own):
        known = {"params": merged(params, {"encoder/embedding": own})}
        encode = functools.partial(model.apply, known, method="encode", collect_hidden=True)
        if stop is None:
            memory = encode(CHUNKS, np.ones_like(MASK))
            hidden = memory.hidden
        else:
            memory, hidden = by_parts(encode, stop)
        text = model.apply(known, TOKENS, memory=memory).hidden
        windows = jnp.square(hidden - 1).sum((0, 2, 3))
        return jnp.append(windows, jnp.square(text - 1).sum())[said]

    return jax.grad(loss)(own)


def by_parts(encode, stop):
    """What is kept of the windows, and their hidden states [B, C, P, D]."""
    memory, hidden = None, []
    for number in range(3):
        part = CHUNKS[:, number : number + 1], np.ones((3, 1, 8), bool)
        new = encode(*part, after=memory)
        hidden.append(new.hidden)
        new, held = dataclasses.replace(new, hidden=None), number < stop
        new = jax.tree.map(functools.partial(jnp.where, held), jax.lax.stop_gradient(new), new)
        memory = new if memory is None else jax.tree.map(behind, memory, new)
    return memory, jnp.concatenate(hidden, 1)


@pytest.mark.slow
@pytest.mark.parametrize("segments", [None, 2])
def test_gradients_end_where_the_papers_sub_steps_do(segments):
    model, params = made(dataclasses.replace(SUMMARY, gradient_segments=segments))
    own = params["encoder"]["embedding"]
    found = [slope(model, params, own, said) for said in range(4)]
    # Of sub-steps of two the second segment alone reads what the first one has learned to sum up.
    assert [float(jnp.abs(one).max()) > 0 for one in found] == [False, True, segments is None, True]
    # The text, as the last, learns through the third segment what that one itself sums up.
    whole, last = (slope(made(SUMMARY)[0], params, own, 3, stop) for stop in (0, 2))
    wanted, other = (whole, last) if segments is None else (last, whole)
    assert_close(found[3], wanted, 1e-5 * float(jnp.abs(wanted).max()))
    assert float(jnp.abs(other - wanted).max()) > 1e-3


def merged(params, own):
    return nest(flatten(params) | own)


def behind(old, new):
    return jnp.concatenate([old, new], 2 if old.ndim == 4 else 1)


@pytest.mark.slow
def test_in_training_each_window_draws_its_ratio():
    section = dataclasses.replace(BEACON, ratios=(2, 8))
    model, params = made(section)
    full = np.ones_like(MASK)
    memory = encoded(model, params, CHUNKS, full, {"key": jax.random.key(3)})
    kept = memory.mask.reshape(3, 3, 4).sum(2)
    assert memory.mask.shape == (3, 12) and set(np.unique(kept)) == {1, 4}
    again, other = (
        encoded(model, params, CHUNKS, full, {"key": jax.random.key(seed)}).mask for seed in (3, 4)
    )
    np.testing.assert_array_equal(again, memory.mask)
    assert (other != memory.mask).any()
    row = int(np.argmax((kept[:, 0] != kept[:, 1]) | (kept[:, 1] != kept[:, 2])))
    oracle = Llama(jax.tree.map(np.asarray, params), model.config)
    wanted, left = with_beacons(oracle, CHUNKS[row], TOKENS[row], 8 // kept[row])
    assert left == kept[row].tolist()
    assert_close(read(model, params, TOKENS, memory)[0][row], wanted)
    assert model.config.for_inference().memory == made(BEACON)[0].config.memory


@pytest.mark.slow
def test_a_ratio_below_all_that_are_drawn_loses_no_beacon():
    model, params = made(dataclasses.replace(BEACON, ratio=2, ratios=(4, 8)))
    plain, _ = made(dataclasses.replace(BEACON, ratio=2))
    found, wanted = (encoded(one, params, CHUNKS, MASK, {}) for one in (model, plain))
    jax.tree.map(assert_close, found, wanted)


@pytest.mark.parametrize("ratio", [2, 4])
def test_slots_suffice_for_the_ratio_and_all_sampled_ratios(ratio):
    memory = Beacon(chunk=8, ratio=ratio, ratios=(4, 8))
    assert memory.max_slots(8) == 8 // ratio
    assert memory.tokens_read(8) == 8 + 8 // ratio


@pytest.mark.parametrize("name", ["beacon", "auto_compressor"])
def test_sizes_of_the_7b_models(name):
    section = BeaconSection() if name == "beacon" else AutoCompressorSection()
    shapes = parameter_shapes(model_config(ModelSection(memory=section), preset("llama2-7b")))
    added = sum(leaf.size for path, leaf in shapes.items() if matcher(("memory",), "")(path))
    # "About 2 billion" are the projections of beacons.
    assert added == {"beacon": 4096 + 32 * 4 * 4096**2, "auto_compressor": 50 * 4096}[name]


@BOTH
def test_a_memory_begins_with_the_embedding_of_a_token_and_the_projections_of_the_text(section):
    params = build(ModelSection(preset="tiny", memory=section))[1]
    table, own = params["embed"]["embedding"], params["encoder"]["embedding"]
    np.testing.assert_array_equal(own, np.tile(table[2], (len(own), 1)))
    attention = dict(params["layers"]["attention"])
    if (beacons := attention.pop("memory", None)) is not None:
        jax.tree.map(np.testing.assert_array_equal, beacons, attention)


BAD = [
    (BEACON, {"ratio": 3}, "chunk=8 must be a multiple of 3.*nearest: 6, 9"),
    (BEACON, {"ratios": (2, 16)}, "chunk=8 must be a multiple of 16.*nearest: 16"),
    (BEACON, {"ratio": 0, "ratios": (2,)}, "ratio=0 keeps all tokens and has no beacons to train"),
    (BEACON, {"ratio": -1}, "ratio=-1"),
    (BEACON, {"chunk": 4096}, "chunk=4096 leaves no room .* 128 tokens.*set it to 64 or less"),
    (BEACON, {"chunk": 112}, "chunk=112 and the 28 slots .* 128 tokens .*set it to 64 or less"),
    (BEACON, {"init_token": 300}, "init_token=300 must lie between 0 and"),
    (SUMMARY, {"summary": 0}, "summary=0"),
    (SUMMARY, {"gradient_segments": 1}, "gradient_segments=1 must be a whole number of at least 2"),
    (SUMMARY, {"summary": 600}, "summary=600 plus chunk=8 exceeds the trained length"),
]


def test_a_window_and_its_summary_may_be_as_long_as_the_model_reads():
    section = dataclasses.replace(SUMMARY, summary=preset("tiny").max_length - SUMMARY.chunk)
    model_config(ModelSection(memory=section), preset("tiny"))
    with pytest.raises(InputError, match=f"use summary <= {section.summary}$"):
        section = dataclasses.replace(section, summary=section.summary + 1)
        model_config(ModelSection(memory=section), preset("tiny"))


@pytest.mark.parametrize(("section", "changes", "words"), BAD)
def test_bad_sections_raise_input_error(section, changes, words):
    with pytest.raises(InputError, match=words) as caught:
        model_config(ModelSection(memory=dataclasses.replace(section, **changes)), preset("tiny"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pattern": Sliding(8)}, "model.pattern is Sliding"),
        ({"rope": DynamicNTK(factor=2.0)}, "that of rope type dynamic_ntk is not"),
        ({"position": "alibi"}, "position=alibi"),
    ],
)
def test_decoders_whose_text_cannot_follow_a_memory_raise_input_error(change, words):
    config = preset("tiny").replace(**change)
    with pytest.raises(InputError, match=words):
        model_config(ModelSection(memory=SUMMARY), config)
