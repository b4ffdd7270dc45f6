"""What a text gets does not depend on the batch, on padding, or on what else is in its row.

For every pattern, RoPE method and memory: scores, continuations and written text of rows alone
equal those in a batch, padded with any tokens, and packed; so do the decoder's hidden states.
"""

import dataclasses
import functools

import draccus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope_examples import rope_examples
from tiny_lm import ids, sharper

from lcjax.attention import InfLLM, Landmark, LMInfinite, Longformer, Pattern, Sliding
from lcjax.checkpoints.build import ModelSection
from lcjax.generation import session
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.memory import (
    AutoCompressorSection,
    BeaconSection,
    CepeSection,
    RetroSection,
    SharedLlmSection,
)
from lcjax.models import Decoder, LayerKind
from lcjax.rope import Default, DynamicNTK, NoRotation

LENGTHS = [61, 23, 23, 61]
TOLERANCE = 5e-5
MARK = 258
TRAINED = 32  # between the lengths, so that a rope that follows the length differs among the rows


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# Those that choose blocks for several tokens at once, or between equal landmarks.
HARD = {
    "landmark-all": Landmark(block=5, top_k=None, token=MARK),
    "landmark-retrieves": Landmark(block=8, top_k=1, train_length=32, token=MARK),
    "landmark-per-chunk": Landmark(
        block=8, top_k=1, train_length=32, token=MARK, select="per_head_and_chunk"
    ),
    "inf_llm-chunks": InfLLM(window=6, sinks=2, block=3, top_k=2, representatives=2, chunk=8),
}
PATTERNS = HARD | {
    "inf_llm-heads": InfLLM(
        window=6, sinks=2, block=3, top_k=2, representatives=2, chunk=16, per_head=True
    ),
    "lm_infinite-chooses": LMInfinite(window=6, sinks=2, top_k=3),
}
for name, choice in Pattern.get_known_choices().items():
    for number, fields in enumerate(choice.examples):
        mark = {"token": MARK} if name == "landmark" else {}
        pattern = draccus.decode(Pattern, {"type": name, **fields, **mark})
        if pattern.is_causal:
            PATTERNS[f"{name}-{number}"] = pattern

ROPES = rope_examples()
# Layers that fix their pattern or rope, under the model's own.
LAYERS = {
    "local": (LayerKind(pattern=Sliding(9), rope=Default(theta=100.0)), LayerKind()),
    "moves": (
        LayerKind(pattern=LMInfinite(window=9, sinks=2), rope=NoRotation()),
        LayerKind(rope=DynamicNTK(factor=2.0, original_length=TRAINED)),
    ),
    "windows": (LayerKind(pattern=Longformer(5)), LayerKind(pattern=Longformer(9, (0,)))),
}
FOLLOW = [name for name, rope in ROPES.items() if rope.depends_on_length]
MEMORIES = {
    "cepe": CepeSection(encoder="tiny-encoder", output_share=1.0),
    "shared_llm": SharedLlmSection(layers=1, chunk=16, ratios=(4, 2, 1), output_share=1.0),
    "beacon": BeaconSection(chunk=16, ratio=4, ratios=(2, 4)),
    "auto_compressor": AutoCompressorSection(chunk=16, summary=3),
    "retro": RetroSection(encoder_layers=1, chunk=4, neighbour_tokens=16, output_share=1.0),
}
CONTEXT = [[ids(20, 39)], [], [ids(21, 16), ids(22, 7)], [ids(23, 5)]]

# (pattern, rope, memory): each pattern and each memory with a rope that is the same for all rows
# and with one that is not (which memories that stand before the text refuse), each rope with plain
# attention.
CASES = [
    ("causal-0", "dynamic_ntk-0", None, "local"),  # layers that differ
    ("inf_llm-chunks", "default-0", None, "local"),
    *((name, "default-0", None) for name in HARD),
    *(("causal-0", rope, None) for rope in FOLLOW),
]
CASES += [
    case
    for case in [
        *((name, rope, None) for name in PATTERNS for rope in ("default-0", "dynamic_ntk-0")),
        *(("causal-0", rope, None) for rope in ROPES),
        *(("causal-0", "default-0", memory) for memory in MEMORIES),
        *(("causal-0", "longrope-0", memory) for memory in ("cepe", "shared_llm")),
        *(("inf_llm-chunks", "default-0", memory) for memory in ("cepe", "shared_llm")),
        ("landmark-per-chunk", "default-0", "cepe"),
        *(("causal-0", rope, None, name) for name in LAYERS for rope in ("default-0", "none-0")),
        ("causal-0", "default-0", "cepe", "local"),
        ("causal-0", "default-0", "retro", "moves"),
    ]
    if case not in CASES
]
# Those that share one compiled program: a rotation is an argument of it.
QUICK = [f"quick-causal-0-{name}" for name in FOLLOW if not ROPES[name].learned]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(filter(None, case)))


@functools.cache
def model(memory, rope, layers, pattern=None):
    section = ModelSection(
        preset="tiny",
        pattern=pattern,
        memory=MEMORIES.get(memory),
        rope=ROPES[rope] if ROPES[rope].learned else None,
        layers=LAYERS.get(layers),
    )
    # An AutoCompressor reads its own summaries: with weights times 3 a change of the last bit of
    # each weight changes scores by 1.4e-4.
    return sharper(LanguageModel.load(section), 2 if memory == "auto_compressor" else 3)


@functools.cache
def loaded(case):
    pattern, rope, memory, layers = (*case, None)[:4]
    pattern = PATTERNS[pattern]
    learned = pattern if pattern.parameters else None
    return model(memory, rope, layers, learned).with_method(pattern=pattern, rope=ROPES[rope])


@pytest.fixture(params=[False, slow(True)], ids=["quick", "optimised"], autouse=True)
def compiled(request, disable_xla_optimizations):
    """As tests compile programs, and as users do."""
    if request.param:
        request.getfixturevalue("enable_xla_optimizations")
    yield
    if request.node.get_closest_marker("slow"):
        jax.clear_caches()  # hundreds of cases have more programs than a process may map


def beside(case, rows):
    return {} if case[2] is None else {"context": [CONTEXT[row] for row in rows]}


def padded(rows, width, seed):
    """Rows of tokens [B, width] that end in random ones, and their lengths."""
    tokens = np.random.default_rng(seed).integers(3, 250, (len(rows), width))
    for number, row in enumerate(rows):
        tokens[number, : LENGTHS[row]] = ids(row, LENGTHS[row])
    return tokens, np.array([LENGTHS[row] for row in rows])


BATCHES = (([0, 1, 2, 3], 61), ([3, 1, 3, 0], 77), ([1], 64))


@pytest.mark.slow_except(*(f"quick-causal-0-{name}" for name in FOLLOW))
@EVERY
def test_scores_of_a_row_are_those_that_it_has_alone(case, monkeypatch):
    lm = loaded(case)
    alone = {}
    for row, length in enumerate(LENGTHS):
        tokens = np.array([ids(row, length)])
        alone[row] = lm.nll(tokens, first=5, **beside(case, [row]))[0]
    for pack in (True, False) if lm.config.is_position_based else (True,):
        with monkeypatch.context() as patched:
            patched.setattr(session, "packing_saves", lambda *sizes, pack=pack: pack)
            for seed, (rows, width) in enumerate(BATCHES):
                tokens, lengths = padded(rows, width, seed)
                scores = lm.nll(tokens, first=5, lengths=lengths, **beside(case, rows))
                for row, row_scores in zip(rows, scores, strict=True):
                    end = LENGTHS[row]
                    np.testing.assert_allclose(row_scores[:end], alone[row], atol=TOLERANCE, rtol=0)
                    assert not row_scores[end:].any()


@pytest.mark.slow_except(*QUICK)
@EVERY
def test_continuations_of_a_prompt_are_scored_as_alone(case):
    lm = loaded(case)
    prompts = [ids(row, length) for row, length in enumerate(LENGTHS)]
    for options in (
        [[ids(30 + row, length)] for row, length in enumerate((4, 7, 5, 2))],
        [[ids(40, 3), ids(41, 9)], [ids(42, 1)], [ids(43, 4)], [ids(44, 5), ids(45, 2)]],
    ):
        batch = lm.continuations(prompts, options, **beside(case, range(4)))
        for row, scored in enumerate(batch):
            alone = lm.continuations([prompts[row]], [options[row]], **beside(case, [row]))[0]
            for one, expected in zip(scored, alone, strict=True):
                np.testing.assert_allclose(one.nll, expected.nll, atol=TOLERANCE, rtol=0)
                assert one.greedy == expected.greedy


@pytest.mark.slow_except(*QUICK)
@EVERY
def test_a_prompt_is_written_on_as_alone(case, monkeypatch):
    lm, sampling = loaded(case), Sampling(max_new_tokens=5, min_new_tokens=5)
    prompts = [ids(row, length) for row, length in enumerate(LENGTHS)]

    def written(rows):
        return [
            text.ids
            for text in lm.generate([prompts[row] for row in rows], sampling, **beside(case, rows))
        ]

    alone = [written([row])[0] for row in range(4)]
    for pack in (True, False) if lm.config.is_position_based else (True,):
        with monkeypatch.context() as patched:
            patched.setattr(session, "packing_saves", lambda *sizes, pack=pack: pack)
            assert written([0, 1, 2, 3]) == alone
            assert written([3, 1, 3, 0]) == [alone[3], alone[1], alone[3], alone[0]]


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(model, params, tokens, segments, rotation):
    return model.apply({"params": params}, tokens, segments=segments, rotation=rotation).hidden


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PATTERNS if "causal" not in name])
def test_documents_of_a_row_have_the_hidden_states_that_they_have_alone(name):
    """Without positions: they count in each document."""
    lm = loaded((name, "default-0", None))
    rotation = lm.rotation(1)
    config = lm.config.replace(rope=Default(theta=10_000.0), scan_layers=False)
    decoder, sizes = Decoder(config), (37, 24, 12)
    parts = [np.array(ids(50 + n, size), np.int32) for n, size in enumerate(sizes)]
    width = sum(sizes) + 7
    rows, segments = np.random.default_rng(1).integers(3, 250, (4, width)), np.zeros((4, width))
    places = [(0, 0), (0, 37), (0, 61), (1, 0), (2, 0), (3, width - 12)]  # each also by itself
    for number, (row, start) in enumerate(places):
        columns = slice(start, start + sizes[number % 3])
        rows[row, columns], segments[row, columns] = parts[number % 3], 1 + number % 3
    states = np.asarray(
        hidden_states(
            decoder, lm.params, jnp.asarray(rows, jnp.int32), jnp.asarray(segments, jnp.int32),
            rotation,
        )
    )  # fmt: skip
    for number, (row, start) in enumerate(places[3:]):
        size, at = sizes[number], places[number][1]
        alone = states[row, start : start + size]
        np.testing.assert_allclose(states[0, at : at + size], alone, atol=TOLERANCE, rtol=1e-5)


def test_every_registered_method_has_a_case():
    assert {case[1] for case in CASES} == ROPES.keys() and FOLLOW
    kinds = {type(pattern) for pattern in PATTERNS.values()}
    known = Pattern.get_known_choices().values()
    assert kinds == {choice for choice in known if choice(**choice.examples[0]).is_causal}
    assert dataclasses.replace(HARD["landmark-retrieves"]) in PATTERNS.values()
