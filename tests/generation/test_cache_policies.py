"""Cache policies: what is kept, what it costs, and that no row notices its batch."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_cache_golden import SCORES, filter_file, golden, head_file
from safetensors.numpy import load_file, save_file
from small_norm import SmallNorm
from tiny_lm import sharp_decoder

import lcjax
from lcjax import cost
from lcjax.attention import CachePolicy, Channels, Critical, Landmark, Merging, Sliding, Threshold
from lcjax.attention.budgets import AcrossLayers, AdaptiveHeads, Composite, LayerRatios
from lcjax.attention.cache import FullCache, Prompt
from lcjax.attention.policies import (
    Cap,
    Compactor,
    Cur,
    DuoAttention,
    ExpectedAttention,
    Finch,
    KeyDiff,
    Knorm,
    KVCompose,
    KVzip,
    LagKV,
    LagKVOriginal,
    Leverage,
    Phases,
    QFilter,
    SimLayerKV,
    SnapKV,
    StreamingCache,
    ThinK,
    Tova,
)
from lcjax.checkpoints import ByteTokenizer, load_config
from lcjax.checkpoints.safetensors_io import SafetensorsFolder
from lcjax.checkpoints.weights import read_params
from lcjax.config import parse
from lcjax.cost.program import collectives
from lcjax.errors import InputError
from lcjax.evaluation import EvalConfig
from lcjax.evaluation.eval_config import Method
from lcjax.evaluation.measure import Stopwatch
from lcjax.evaluation.split import ReplugSplit
from lcjax.generation.conversation import Conversation
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.query_filters import write_query_filters
from lcjax.generation.readings import Readings
from lcjax.generation.sampling import Sampling
from lcjax.generation.session import Session, lower_cut, read_prompts
from lcjax.generation.shared_prefix import QueryAgnostic, QueryAware, read_prefix
from lcjax.models import Decoder, LayerKind, preset
from lcjax.models import cache as cache_lib
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.training import TrainConfig
from lcjax.training import run as train

TINY = preset("tiny")
SIX = Sampling(max_new_tokens=6, min_new_tokens=6)
DUO = DuoAttention(head_file([[0.9, 0.1], [0.2, 0.8]]), sinks=3, recent=17, every=4)

# Channels of keys are dropped, of those that stay or of all.
THIN = Knorm(ratio=0.5, every=4, channels=Channels(window=8))
THINK = ThinK(every=4, channels=Channels(window=8))
LAZY = SimLayerKV(lazy_threshold=0.25, recent=24)


def named(policy):
    """Its fields, the same in every process: without the folder of a file."""
    return re.sub(r"file='[^']*/", "file='", str(policy))


@dataclasses.dataclass(frozen=True)
class Newest(CachePolicy):
    def score(self, slots):
        return slots.index.astype(jnp.float32)


@pytest.fixture(scope="module")
def lm():
    return sharp_decoder(TINY)


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


# Released code


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def golden_lm(request, tmp_path_factory):
    document, arrays = golden()
    folder, name = tmp_path_factory.mktemp("model"), request.param
    (folder / "config.json").write_text(json.dumps(document["models"][name]))
    prefix = f"model.{name}."
    weights = {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}
    save_file(weights, folder / "model.safetensors")
    config = load_config(folder)
    params = read_params(SafetensorsFolder(folder), config)
    return LanguageModel(Decoder(config), params, ByteTokenizer())


class Requests:
    """A tokenizer that encodes the last letter of a text as fixed ids."""

    def __init__(self, ids):
        self.ids = ids

    def encode(self, text, *, allow_special=False):
        return self.ids.get(text[-1], [])


KVZIP = {"first_request": "F", "next_request": "N", "suffix": "S"}
ALL = AcrossLayers(most=4)  # heads lose nothing to the size of the cache
CUT = {  # case: policy
    "kvzip.one_chunk": KVzip(ratio=0.5, heads=ALL, **KVZIP),
    "kvzip.chunks_plus": KVzip(ratio=0.6, repeat_size=32, heads=ALL, normalized=True, **KVZIP),
    "kvzip.layerwise_prefix": KVzip(
        ratio=0.5, repeat_size=40, heads=AdaptiveHeads(floor=0.0, most=4), prefix=7, **KVZIP
    ),
    "finch.rerotated": Finch(ratio=0.5, window=12),
    "finch.chunks": Finch(ratio=0.5, window=8, part=20, positions="text"),
    "rerotation.snapkv": SnapKV(ratio=0.5, window=8, pool=5, positions="consecutive"),
    "simlayerkv.some_lazy": SimLayerKV(lazy_threshold=0.46, recent=40),
    "kvcompose.structured": KVCompose(ratio=0.4, heads=Composite(most=4)),
    "merging.knorm": Knorm(ratio=0.5, merge=Merging(fraction=0.75)),
    "think.half": ThinK(channels=Channels(0.5, window=16)),
    **SCORES,
}


def model_of(case):
    """The name of the model of a case."""
    document, _ = golden()
    return document["bases"][document["cases"][case]["base"]]["model"]


# Scores and survivors of the others are those of one layer, too (tests/attention).
@pytest.mark.slow_except(
    *(name for name in CUT if name.startswith(("kvzip", "finch", "rerot", "think")))
)
@pytest.mark.parametrize(
    ("golden_lm", "case"),
    [pytest.param(model_of(name), name, id=name) for name in CUT],
    indirect=["golden_lm"],
)
def test_a_cut_prompt_gives_the_logits_of_the_released_code(golden_lm, case):
    document, arrays = golden()
    base, params = document["cases"][case]["base"], document["cases"][case]["params"]
    lm = golden_lm.with_method(cache=CUT[case])
    ids = {"F": "first_prompt", "N": "next_prompt", "S": "suffix"}
    tokenizer = Requests({letter: params.get(name) for letter, name in ids.items()})
    prompts, rest = (arrays[f"base.{base}.{name}"] for name in ("ids", "continuation"))
    session = read_session(lm, prompts, 16, tokenizer=tokenizer)
    for layer, mask in zip(session.cache.layers, arrays[f"{case}.kept"], strict=True):
        order = np.asarray(layer["order"])[..., 0]
        for row, head in np.ndindex(order.shape[:2]):
            actual = order[row, head][order[row, head] > 0] - 1
            np.testing.assert_array_equal(actual, np.flatnonzero(mask[row, head]))
    for number, values in enumerate(arrays.get(f"{case}.merged_v", ())):
        layer, mask = session.cache.layers[number], arrays[f"{case}.kept"][number].astype(bool)
        for head in np.ndindex(mask.shape[:2]):
            actual = layer["values"][head][layer["order"][head][:, 0] > 0]
            np.testing.assert_allclose(actual, values[head][mask[head]], atol=2e-5)
    for layer, is_kept in zip(session.cache.layers, arrays.get(f"{case}.channels", ())):
        expected = np.argwhere(is_kept)[:, -1].reshape(layer["channels"].shape)
        np.testing.assert_array_equal(layer["channels"], expected)
    for step, token in enumerate(rest.T):
        logits = session.read(token, None, np.full((len(token), 1), prompts.shape[1] + step))
        np.testing.assert_allclose(logits, arrays[f"{case}.logits"][:, step], atol=2e-4)


@pytest.mark.parametrize("golden_lm", ["llama"], indirect=True)
def test_a_prompt_is_cut_and_continued_as_in_the_released_code(golden_lm):
    document, arrays = golden()
    case, base = "knorm.rows", "llama_b2"
    masks, prompts = arrays[f"{case}.kept"], arrays[f"base.{base}.ids"]
    policy = SmallNorm(ratio=document["cases"][case]["params"]["ratio"])
    lm = golden_lm.with_method(cache=policy)
    continuations = arrays[f"base.{base}.continuation"]
    following = arrays[f"{case}.logits"].astype(np.float64)
    following = following - np.log(np.exp(following).sum(-1, keepdims=True))
    scores = lm.continuations(prompts.tolist(), [[ids] for ids in continuations.tolist()])
    for row, (score,) in enumerate(scores):
        expected = [-following[row, t, x] for t, x in enumerate(continuations[row][1:])]
        np.testing.assert_allclose(score.nll[1:], expected, atol=2e-4)
    session = read_session(lm, prompts, 16)
    for layer, mask in zip(session.cache.layers, masks, strict=True):
        order = np.asarray(layer["order"])[..., 0]
        for row, head in np.ndindex(order.shape[:2]):
            actual = order[row, head][order[row, head] > 0] - 1
            np.testing.assert_array_equal(actual, np.flatnonzero(mask[row, head]))


@pytest.mark.parametrize(
    ("golden_lm", "case", "base", "make"),
    [
        ("llama", "chunked.keydiff", "llama96", KeyDiff),
        ("qwen3", "chunked.snapkv", "qwen80", functools.partial(SnapKV, window=6, pool=5)),
    ],
    indirect=["golden_lm"],
)
def test_a_text_is_read_by_chunks_as_in_the_released_code(golden_lm, case, base, make):
    document, arrays = golden()
    params = document["cases"][case]["params"]
    chunk, *_ = params["calls"]
    lm = golden_lm.with_method(cache=make(tokens=params["target"], chunk=chunk))
    ids = [arrays[f"base.{base}.{name}"] for name in ("ids", "continuation")]
    ids = np.concatenate(ids, 1)[:, : sum(params["calls"])]
    np.testing.assert_allclose(lm.logits(ids), arrays[f"{case}.logits"], atol=2e-4)


@pytest.mark.slow_except("decoding.knorm", "duo_attention.half")
@pytest.mark.parametrize(
    ("golden_lm", "case", "make"),
    [
        pytest.param(model, case, make, id=case)
        for model, case, make in (
            ("llama", "decoding.knorm", lambda of: Phases(Knorm(tokens=of["target"], every=3))),
            ("qwen3", "decoding.tova", lambda of: Phases(Tova(tokens=of["target"], every=2))),
            ("qwen3", "decoding.ratio_keydiff", lambda of: Phases(KeyDiff(ratio=0.5, every=2))),
            (
                "llama", "decoding.after_prefill",
                lambda of: Phases(StreamingCache(tokens=32, every=1), KeyDiff(ratio=0.5)),
            ),
            ("llama", "dms.decoding", lambda of: Knorm(threshold=Threshold(-4.6, window=16))),
            (
                "llama", "duo_attention.half",
                lambda of: DuoAttention(
                    head_file(of["head_scores"]), of["head_ratio"], of["sink"], of["recent"]
                ),
            ),
        )
    ],
    indirect=["golden_lm"],
)  # fmt: skip
def test_generated_tokens_are_read_as_in_the_released_code(golden_lm, case, make):
    document, arrays = golden()
    about = document["cases"][case]
    params, base = about["params"], about["base"]
    lm = golden_lm.with_method(cache=make(params))
    ids = [arrays[f"base.{base}.{name}"] for name in ("ids", "continuation")]
    ids = np.concatenate(ids, 1)
    first = params["calls"][0] if "calls" in params else arrays[f"base.{base}.ids"].shape[1]
    total = sum(params["calls"]) if "calls" in params else ids.shape[1]
    logits, released = arrays[f"{case}.logits"], arrays[f"{case}.kept"].astype(bool)
    logits = logits[:, first:] if "calls" in params else logits
    session = read_session(lm, ids[:, :first], total - first)
    for step in range(total - first):
        token, place = ids[:, first + step].astype(np.int32), np.array([[first + step]])
        actual = session.read(token, None, place)
        np.testing.assert_allclose(actual, logits[:, step], atol=2e-4)
        if "calls" in params:  # the release cuts after a call, and lcjax before the next one
            before = {
                head: set(np.flatnonzero(released[step][head])) for head in heads_of(released[step])
            }
            assert held_tokens(session.cache) == {k: x | {first + step} for k, x in before.items()}
    if case == "dms.decoding":
        expected = {head: set(np.flatnonzero(released[head])) for head in heads_of(released)}
        assert held_tokens(session.cache) == expected


def order_of(layer):
    """Order indices plus 1 of the tokens of heads that evict, [B, K, S, 1]."""
    return layer["order" if "order" in layer else "streaming.order"]


def heads_of(mask):
    """The indices (layer, row, head) of a mask of tokens, bool [L, B, K, T]."""
    return list(np.ndindex(mask.shape[:3]))


def held_tokens(cache):
    """The order indices of the tokens that a cache holds, a set for each (layer, row, head)."""
    orders = [np.asarray(order_of(layer))[..., 0] for layer in cache.layers]
    return {
        (number, *head): set((order[head][order[head] > 0] - 1).tolist())
        for number, order in enumerate(orders)
        for head in np.ndindex(order.shape[:2])
    }


@pytest.mark.parametrize("golden_lm", ["qwen3"], indirect=True)
def test_query_filters_are_singular_vectors_of_the_queries(golden_lm, tmp_path):
    """The first right one of each head's, on the side of its queries, as Godey et al. have it."""
    _, arrays = golden()
    ids, queries = arrays["base.qwen80.ids"].tolist(), arrays["base.qwen80.q"][:, 0]
    vectors = np.linalg.svd(queries.astype(np.float64), full_matrices=False)[2][:, :, 0]
    sides = np.sign(np.einsum("lnth,lnh->ln", queries, vectors))
    expected = -(vectors * sides[..., None]).reshape(3, 2, 3, 8).mean(2)
    file = tmp_path / "filters.safetensors"
    write_query_filters(golden_lm, ids * 2, file)
    np.testing.assert_allclose(load_file(file)["q_filters"], expected, atol=1e-5)
    # Two layers that see all tokens, and one with a window
    layers = LayerKind(2), LayerKind(1, Sliding(16))
    config = golden_lm.config.replace(layers=layers)
    mixed = LanguageModel(Decoder(config), golden_lm.params, golden_lm.tokenizer)
    write_query_filters(mixed, ids, file)
    np.testing.assert_allclose(load_file(file)["q_filters"], expected[:2], atol=1e-5)
    for texts, words in (([], "texts is empty, or the model"), ([[5]], r"texts\[0\] has 1 tokens")):
        with pytest.raises(InputError, match=words):
            write_query_filters(golden_lm, texts, file)
    for name, words in ((file, "2 layers of 2 key heads.*model has 3"), ("x", "no .safetensors")):
        cut = golden_lm.with_method(cache=QFilter(tokens=20, file=str(name)))
        with pytest.raises(InputError, match=words):
            cut.generate([ids[0]], SIX)


# Properties


def read_session(lm, prompts, new, tokenizer=None, **options):
    """Returns a session that has read prompts of one length."""
    prompts = np.asarray(prompts, np.int32)
    length = prompts.shape[1]
    options = {"chunk": length, "mesh": lm.mesh} | options
    cache = cache_lib.create(lm.model.config, len(prompts), length + new, **options)
    session = Session(lm.model, lm.params, cache, lm.rotation(length + new))
    session.read(prompts, None, np.tile(np.arange(length), (len(prompts), 1)))
    session.end_prompt(new, options["chunk"], prompts, tokenizer or lm.tokenizer)
    return session


# At the end of a prompt, the quick proof is that of prompts that continue a prefix.
POLICIES = [
    pytest.param(SmallNorm(tokens=32), marks=pytest.mark.slow),
    KeyDiff(tokens=32, chunk=16, every=5),
    pytest.param(KVzip(tokens=20, repeat_size=32), id="kvzip"),
    *(
        pytest.param(method, marks=pytest.mark.slow)
        for method in (
            DUO,
            dataclasses.replace(DUO, chunk=16),
            Phases(Knorm(tokens=20, every=2)),
            Knorm(threshold=Threshold(-6.0, window=8)),
            LagKVOriginal(ratio=0.5, sinks=2, lag=8),
            THIN,
            THINK,
            LAZY,
            KVCompose(ratio=0.5),
        )
    ),
]


@pytest.mark.parametrize("policy", POLICIES, ids=named)
def test_a_row_in_a_batch_is_the_row_alone(lm, policy):
    lm = lm.with_method(cache=policy)
    prompts = [text(1, 90), text(2, 41), text(3, 7)]
    assert lm.generate(prompts, SIX) == [lm.generate([prompt], SIX)[0] for prompt in prompts]
    continuations = [[text(9, 5), text(8, 3)]] * 3
    together = lm.continuations(prompts, continuations)
    for prompt, row, rest in zip(prompts, together, continuations, strict=True):
        (alone,) = lm.continuations([prompt], [rest])
        for one, other in zip(row, alone, strict=True):
            np.testing.assert_allclose(one.nll, other.nll, atol=1e-4)


def test_scores_of_a_text_do_not_depend_on_padding_and_are_causal(lm):
    lm = lm.with_method(cache=SmallNorm(tokens=32, chunk=16))
    rows, lengths = np.array([text(1, 90), text(2, 90)]), np.array([90, 53])
    scores = lm.nll(rows, lengths=lengths)
    np.testing.assert_allclose(scores[1, :53], lm.nll(rows[1:, :53])[0], atol=1e-4)
    changed = rows.copy()
    changed[0, 60:] = text(5, 30)
    np.testing.assert_allclose(lm.nll(changed)[0, :60], scores[0, :60], atol=1e-5)
    ample = lm.with_method(cache=SmallNorm(tokens=512, chunk=16)).nll(rows, lengths=lengths)
    assert np.abs(scores - ample).max() > 1e-3


def test_scored_tokens_stay_however_many_are_read_at_once(lm, monkeypatch):
    lm, rows = lm.with_method(cache=SmallNorm(tokens=32, every=8)), np.array([text(1, 190)])
    scores = lm.nll(rows, first=61)
    monkeypatch.setattr("lcjax.generation.scoring.prefill_chunk_size", lambda _: 32)
    np.testing.assert_allclose(lm.nll(rows, first=61), scores, atol=1e-4)


def test_the_end_of_a_text_is_scored_after_the_cut_of_its_beginning(lm):
    lm = lm.with_method(cache=SmallNorm(tokens=32))
    rows, lengths = np.array([text(1, 90), text(2, 90), text(3, 90)]), np.array([90, 77, 30])
    scores = lm.nll(rows, first=61, lengths=lengths)
    parts = [row[:length].tolist() for row, length in zip(rows[:2], lengths)]
    rest = lm.continuations([row[:60] for row in parts], [[row[60:]] for row in parts])
    for row, score, ((alone, _),) in zip(parts, scores, rest):
        np.testing.assert_allclose(score[61 : len(row)], alone[1:], atol=1e-4)
        assert not score[:61].any() and not score[len(row) :].any()
    assert not scores[2].any()


def test_a_cache_that_loses_nothing_is_the_full_cache(lm):
    for policy in (SmallNorm(tokens=128), SmallNorm(tokens=128, chunk=16)):
        kinds = [
            cache_lib.create(config, 1, 128, chunk=16).kinds
            for config in (lm.config, lm.config.replace(cache=policy))
        ]
        assert kinds[0] == kinds[1] == (FullCache(),)
    # If more may follow, heads are folded into rows: the same numbers until something is evicted.
    reads = lm.with_method(cache=SmallNorm(tokens=90, every=64))
    (full,), (folded,) = (m.continuations([text(1, 90)], [[text(7, 6)]])[0] for m in (lm, reads))
    np.testing.assert_allclose(folded.nll, full.nll, atol=2e-5)


def test_memory_after_a_prompt_is_that_of_the_survivors(lm):
    config = lm.config.replace(num_layers=2)
    full = cost.generation_memory(config, 4096, 1, Mesh(fsdp=1)).cache
    evicting = lm.with_method(cache=SmallNorm(tokens=128, every=64))
    session = read_session(evicting, [text(1, 1024)], 64)
    arrays = [x for layer in session.cache.layers for x in layer.values()]
    assert {x.shape[2] for x in arrays} == {192}
    # Without the slots for later tokens
    assert evicting.cache_bytes(1024) == sum(x.nbytes for x in arrays) * 128 / 192
    by_chunk = SmallNorm(tokens=128, chunk=64, every=64)
    small = cost.generation_memory(config.replace(cache=by_chunk), 4096, 1, Mesh(fsdp=1), chunk=64)
    created = cache_lib.create(config.replace(cache=by_chunk), 1, 4096, chunk=64)
    # The chunk of the policy is what is read at once, whatever the caller's is.
    assert lm.with_method(cache=by_chunk).inference_memory(1, 4096).cache == small.cache
    assert small.cache == sum(x.nbytes for x in jax.tree.leaves(created.layers))
    assert small.cache < full * (192 / 4096) * 1.1
    assert cost.visible_keys(config, 4096, 1) == 4096
    assert cost.visible_keys(config.replace(cache=by_chunk), 4096, 1) == 192
    # A prompt that is cut at its end is read in full.
    at_end = config.replace(cache=SmallNorm(tokens=128, every=64))
    assert cost.visible_keys(at_end, 4096, 1) == 192
    for count in (cost.visible_keys, cost.resources.read_cache_bytes):
        assert count(at_end, 4096, 4096) >= count(config, 4096, 4096)
    # A layer counts the keys that a new token may see: those kept, and those since the last cut.
    one, other = (cost.estimate(c, 4096) for c in (config, config.replace(cache=by_chunk)))
    assert other.kv_cache_bytes < one.kv_cache_bytes * (192 / 4096) * 1.1


def test_keys_of_a_cut_prompt_have_the_channels_that_stay(lm):
    each = 8 * 4 + 16 * 4 + 4  # half of the channels of a key, a value and an order index
    thin = lm.with_method(cache=THIN)
    assert thin.cache_bytes(1024) == 2 * 2 * (512 * each + 8 * 4)
    read = cost.resources.read_cache_bytes(thin.config, 1024)
    assert read == 2 * 2 * ((512 + 4) * each + 8 * 4 + 4 * 16 * 4)
    session = read_session(thin, [text(1, 60)], 100)
    for layer in session.cache.layers:
        slots = layer["values"].shape[2]
        assert layer["keys"].shape == (1, 2, slots, 8)
        assert layer["new_keys"].shape == (1, 2, slots - 80, 16)


@pytest.mark.parametrize(("threshold", "slots"), [(0.0, 64), (1.0, 128)])
def test_layers_that_are_lazy_in_all_rows_have_few_slots(lm, threshold, slots):
    lazy = lm.with_method(cache=SimLayerKV(lazy_threshold=threshold, recent=20))
    session = read_session(lazy, [text(1, 90), text(2, 90)], 8)
    assert [layer["values"].shape[2] for layer in session.cache.layers] == [slots] * 2
    assert {len(head) for head in held_tokens(session.cache).values()} == {
        23 if slots == 64 else 90
    }
    assert lazy.cache_bytes(90) > lm.cache_bytes(90)  # of no layer is known that it will be lazy


def test_streaming_heads_have_slots_for_the_tokens_that_they_keep(lm):
    config, method = lm.config, dataclasses.replace(DUO, chunk=64)
    full = cost.generation_memory(config, 4096, 1, Mesh(fsdp=1)).cache
    duo = config.replace(cache=method)
    cache = cache_lib.create(duo, 1, 4096, chunk=64)
    assert [layer["keys"].shape[1:3] for layer in cache.layers] == [(1, 4096)] * 2
    assert [layer["streaming.keys"].shape[1:3] for layer in cache.layers] == [(1, 128)] * 2
    held = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    assert held == cost.generation_memory(duo, 4096, 1, Mesh(fsdp=1), chunk=64).cache
    assert full / 2 < held < full * (0.5 + 0.02)
    after = lm.with_method(cache=DUO).cache_bytes(1024)
    assert after == lm.cache_bytes(1024) * (1024 + 20) / 2048 + 2 * 20 * 4  # and order indices
    read = cost.resources.read_cache_bytes(lm.config.replace(cache=DUO), 1024)
    pair, heads = 2 * 16 * 4, 2  # a key and its value; heads of all layers that keep all, or stream
    assert read == heads * (1024 * pair + (20 + 4) * (pair + 4))
    assert cost.visible_keys(lm.config.replace(cache=DUO), 1024, 1) == (1024 + 24) / 2
    for table, kv_heads in (([[0.9, 0.1], [0.2, 0.8]], 2), ([[0.9, 0.1, 0.9, 0.1]] * 2, 4)):
        tables, mesh = dataclasses.replace(DUO, file=head_file(table)), Mesh(fsdp=1, tensor=2)
        split = config.replace(cache=tables, num_heads=4, num_kv_heads=kv_heads)
        arrays = cache_lib.abstract_cache(split, 1, 4096, mesh=make_mesh(mesh, jax.devices()[:2]))
        expected = sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(arrays.layers)
        )
        assert cost.generation_memory(split, 4096, 1, mesh, chunk=4096).cache == expected
    none = dataclasses.replace(method, share=0.0)
    assert cache_lib.create(config.replace(cache=none), 1, 4096).kinds == (FullCache(),)
    for table, words in (
        ([[0.5, 0.1]], "has 1 lines, and the model has 2 layers"),
        ([[0.5] * 3] * 2, "scores of 3 key heads, and the model has 2"),
    ):
        other = config.replace(cache=dataclasses.replace(method, file=head_file(table)))
        with pytest.raises(InputError, match=words):
            cache_lib.create(other, 1, 4096)
    with pytest.raises(InputError, match=r"model.cache.file=heads.tsv is no table of numbers"):
        cache_lib.create(config.replace(cache=DuoAttention("heads.tsv")), 1, 4096)


def test_generated_tokens_are_evicted_every_few_steps(lm):
    policy = SmallNorm(tokens=20, every=3)
    lm = lm.with_method(cache=policy)
    session = read_session(lm, [text(1, 30)], 12)
    selected, ids = None, text(2, 12)
    for step, token in enumerate(ids):
        before = {name: np.asarray(x) for name, x in session.cache.layers[0].items()}
        session.read(np.array([token], np.int32), None, np.array([[30 + step]]))
        order = np.asarray(session.cache.layers[0]["order"])[0, :, :, 0]
        held = [set(head[head > 0] - 1) for head in order]
        if step and step % 3 == 0:  # the three tokens since the last cut compete with the survivors
            norms = np.linalg.norm(before["keys"][0], axis=-1)
            index = before["order"][0, ..., 0] - 1
            norms[index < 0] = np.inf
            best = np.argsort(norms, axis=-1)[:, :20]
            selected = [set(index[head, best[head]]) for head in range(len(best))]
        if selected is not None:
            new = {30 + step - age for age in range(step % 3 + 1)}
            assert held == [head | new for head in selected]
        assert all(len(head) <= 23 for head in held)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(SmallNorm(tokens=24), marks=pytest.mark.slow),
        KeyDiff(tokens=24, chunk=32, every=4),
        pytest.param(
            KVzip(tokens=20, repeat_size=32, normalized=True), marks=pytest.mark.slow, id="kvzip"
        ),
        pytest.param(Compactor(tokens=24, block=16), marks=pytest.mark.slow),
        pytest.param(Leverage(ratio=0.6, part=20, sketch=8), marks=pytest.mark.slow),
        pytest.param(
            QFilter(tokens=24, file=filter_file(np.random.default_rng(0).normal(size=(2, 2, 16)))),
            marks=pytest.mark.slow,
        ),
        pytest.param(DUO, marks=pytest.mark.slow),
        pytest.param(THIN, marks=pytest.mark.slow),
        pytest.param(LAZY, marks=pytest.mark.slow),
        pytest.param(KVCompose(ratio=0.5), marks=pytest.mark.slow),
        pytest.param(Knorm(ratio=0.5, merge=Merging(fraction=0.5)), marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_a_mesh_gives_the_numbers_of_one_device(lm, policy):
    mesh = make_mesh(Mesh(fsdp=2, tensor=2), jax.devices()[:4])
    lm = lm.with_method(cache=policy)
    params = jax.tree.map(np.asarray, lm.params)
    sharded = LanguageModel(
        Decoder(lm.config.replace(scan_layers=False), mesh), params, lm.tokenizer
    )
    prompts, rest = [text(1, 70), text(2, 33), text(3, 50)], [[text(4, 5)]] * 3
    for one, other in zip(lm.continuations(prompts, rest), sharded.continuations(prompts, rest)):
        np.testing.assert_allclose(other[0].nll, one[0].nll, atol=1e-4)


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(tokens=64, window=8),
        pytest.param(ExpectedAttention(tokens=64), marks=pytest.mark.slow),
        pytest.param(LagKV(tokens=64, lag=8), marks=pytest.mark.slow),
        pytest.param(Knorm(tokens=64, critical=Critical()), marks=pytest.mark.slow),
        pytest.param(Cap(tokens=64), marks=pytest.mark.slow),
        pytest.param(Compactor(tokens=64, block=32), marks=pytest.mark.slow),
        pytest.param(Cur(ratio=0.75, part=64), marks=pytest.mark.slow),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_each_device_cuts_its_heads(policy):
    config = TINY.replace(cache=policy, num_layers=1)
    mesh = make_mesh(Mesh(fsdp=2, tensor=2), jax.devices()[:4])
    compiled = lower_cut(config, mesh, 4, 256, 256).compile()
    received = sum(traffic.bytes for traffic in collectives(compiled.as_text()).values())
    keys = 4 * 2 * 256 * 16 * 4
    assert received <= keys / 4  # scores and places, which compilers gather to sort them


def test_layers_with_a_window_are_left_alone(lm):
    layers = (LayerKind(1, Sliding(window=16)), LayerKind(1))
    mixed = lm.config.replace(layers=layers)
    plain, evicting = (
        cache_lib.create(config, 1, 512, chunk=32)
        for config in (mixed, mixed.replace(cache=Newest(tokens=64, chunk=32, every=32)))
    )
    assert plain.kinds[0] == evicting.kinds[0]
    assert [layer["keys"].shape[2] for layer in evicting.layers] == [64, 128]


def test_the_newest_tokens_give_the_numbers_of_a_window_of_as_many(lm):
    # One layer, since the window of the second layer reaches further back.
    config = lm.config.replace(num_layers=1, scan_layers=False)
    params = {k: x for k, x in lm.params.items() if k != "layers_1"}
    one = LanguageModel(Decoder(config), params, lm.tokenizer)
    window = one.with_method(pattern=Sliding(window=21))
    newest = one.with_method(cache=Newest(tokens=20, every=1))
    sessions = [read_session(method, [text(1, 80)], 6) for method in (window, newest)]
    for step, token in enumerate(text(2, 6)):
        token, position = np.array([token], np.int32), np.array([[80 + step]])
        expected, actual = (session.read(token, None, position) for session in sessions)
        np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.slow), 5])
def test_consecutive_positions_are_those_of_a_text_of_the_survivors(lm, chunk):
    """In one layer, keys depend on tokens and positions alone (StreamingLLM's paper)."""
    config = lm.config.replace(num_layers=1, scan_layers=False)
    params = {k: x for k, x in lm.params.items() if k != "layers_1"}
    one = LanguageModel(Decoder(config), params, lm.tokenizer)
    policy = StreamingCache(tokens=20, sinks=4, every=1, chunk=chunk, positions="consecutive")
    ids = text(1, 46)
    session = read_session(one.with_method(cache=policy), [ids[:5]] if chunk else [ids[:40]], 46)
    first = 5 if chunk else 40
    size = chunk or 1
    for start in range(first, 45, size):
        new = ids[start : start + size]
        places = np.arange(start, start + size)[None]
        logits = session.read(np.array([new]), None, places)
        old = ids[:start]
        visible = old if len(old) <= 20 else old[:4] + old[-16:]
        expected = one.logits(np.array([visible + new]))[0, -1]
        np.testing.assert_allclose(logits[0], expected, atol=1e-4)


def test_scores_that_are_no_numbers_come_last(lm):
    class Broken(Newest):
        def score(self, slots):
            return jnp.where(slots.index % 2 == 0, jnp.nan, -jnp.inf)

    kind, _ = Broken(tokens=4).layer_cache(lm.config.pattern, None).fit(8, 8)
    order = jnp.array([1, 0, 2, 3, 0, 4, 5, 6])[None, None, :, None]
    zeros = jnp.zeros((1, 1, 8, 2))
    arrays = {"keys": zeros, "values": zeros, "order": order}
    order = kind.cut(arrays, Prompt(jnp.array([6]), lm.rotation(8)))["order"].ravel()
    assert order.tolist() == [3, 4, 5, 6, 0, 0, 0, 0]  # of equal scores the later tokens


def test_methods_that_cut_a_prompt_in_other_ways_read_it_once(lm):
    """Their answers are those of a reading of their own, also after others wrote into a copy."""
    shared, few = lm.with_method(), lm.with_method()
    shared.readings, few.readings = Readings(10**9, Stopwatch), Readings(1, Stopwatch)
    prompts, rest = [text(1, 60), text(2, 45)], [[text(3, 8)], [text(4, 5)]]
    methods = [
        KeyDiff(ratio=0.5), SmallNorm(ratio=0.75), SmallNorm(tokens=20, critical=Critical()),
        SnapKV(ratio=0.5, window=8), SnapKV(ratio=0.25, window=8), SnapKV(ratio=0.5, window=4),
    ]  # fmt: skip
    for _ in range(2):
        for method in methods:
            alone, *others = (
                model.with_method(cache=method).continuations(prompts, rest)
                for model in (lm, shared, few)
            )
            for scores in others:
                for one, other in zip(alone, scores, strict=True):
                    np.testing.assert_array_equal(one[0].nll, other[0].nll)
    assert len(shared.readings) == 4 and not len(few.readings)
    assert shared.readings.saved_seconds > 0 and few.readings.saved_seconds == 0


def test_a_repeated_text_is_the_one_since_the_last_cut(lm):
    """What was cut before keeps its scores, and a window in other layers is left alone."""
    layers = (LayerKind(1, Sliding(window=16)), LayerKind(1))
    policy = KVzip(tokens=30, repeat_size=16, heads=None, **KVZIP)
    texts = text(1, 40), text(2, 24)
    tokenizer = Requests({"F": [1, 2], "N": [3], "S": [4]})
    mixed = LanguageModel(
        Decoder(lm.config.replace(layers=layers, cache=policy)), lm.params, lm.tokenizer
    )
    ends = []
    for chunk in (40, 8):  # with the smaller one, the window is a ring
        session = read_session(mixed, [texts[0]], 40, tokenizer=tokenizer, chunk=chunk)
        before = scores_by_token(session)
        places = np.arange(40, 64)[None]
        session.read(np.array([texts[1]]), None, places, sizes=(8, 8, 8))
        session.end_prompt(8, chunk, [texts[1]], tokenizer, start=40)
        ends.append(scores_by_token(session))
        assert len(ends[-1][0]) == 30 and all(max(head) >= 40 for head in ends[-1])
        for old, new in zip(before, ends[-1], strict=True):
            assert all(old[token] == score for token, score in new.items() if token < 40)
    for one, other in zip(*ends, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def scores_by_token(session):
    """The scores of the tokens that each head of the last layer keeps, by order index."""
    order, received = (
        np.asarray(session.cache.layers[1][x])[0, ..., 0] for x in ("order", "received")
    )
    return [
        {int(i) - 1: float(score) for i, score in zip(*head) if i}
        for head in zip(order, received, strict=True)
    ]


def order_indices_of(layer):
    """Order indices of the tokens that each head of a layer keeps in row 0."""
    order = np.asarray(order_of(layer))[0, :, :, 0]
    return [(head[head > 0] - 1).tolist() for head in order]


@pytest.mark.parametrize(
    "method",
    [
        SmallNorm(tokens=24, every=8),
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in (
                SmallNorm(tokens=24, chunk=16, every=8),
                Knorm(threshold=Threshold(-6.0, window=8)),
                Phases(Knorm(tokens=24, every=4)),
                Phases(Knorm(tokens=24, every=4), KeyDiff(ratio=0.5)),
                KVzip(ratio=0.5, repeat_size=32),
                KVCompose(ratio=0.5),
                DUO,
                THIN,
            )
        ),
    ],
    ids=named,
)
def test_a_conversation_goes_on_after_its_prompts_are_cut(lm, method):
    talk = Conversation(lm.with_method(cache=method), length=256)
    for turn in range(2):
        talk.read(text(turn, 40))
        assert len(talk.write(SIX).ids) == 6
    kinds = [getattr(kind, "stream", kind) for kind in talk._session.cache.kinds]
    assert {kind.is_prompt for kind in kinds} == {False}
    # The last token that was read is there, and others were evicted.
    last = len(talk.tokens) - 2
    for head in order_indices(talk._session.cache):
        assert head[-1] == last and len(head) < last


@pytest.mark.parametrize(
    "prompt",
    [None, pytest.param(Knorm(threshold=Threshold(-1e9)), marks=pytest.mark.slow)],
    ids=named,
)
def test_a_conversation_keeps_a_prompt_that_loses_nothing(lm, prompt):
    """Also if its length is no whole number of blocks of slots."""
    method = Phases(Knorm(tokens=24, every=4), prompt)
    talk = Conversation(lm.with_method(cache=method), length=200, prefill_chunk=32)
    talk.read(text(1, 150))
    talk.write(Sampling(max_new_tokens=1))
    for head in order_indices(talk._session.cache):
        assert head == list(range(150))


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(tokens=40, window=8, every=4),
        pytest.param(KeyDiff(ratio=0.5, every=4), marks=pytest.mark.slow),
        pytest.param(Compactor(ratio=0.5, block=16, every=4), marks=pytest.mark.slow),
        pytest.param(KVzip(ratio=0.5, repeat_size=48), marks=pytest.mark.slow, id="kvzip"),
        pytest.param(DUO, marks=pytest.mark.slow),
        pytest.param(Phases(Knorm(tokens=40, every=2), KeyDiff(ratio=0.3)), marks=pytest.mark.slow),
        pytest.param(THIN, marks=pytest.mark.slow),
        pytest.param(LAZY, marks=pytest.mark.slow),
        pytest.param(KVCompose(ratio=0.5), marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_prompts_continue_a_prefix_that_was_cut_before_it_saw_them(lm, policy):
    lm = lm.with_method(cache=policy)
    context, questions = text(1, 90), [text(2, 3), text(3, 17), text(4, 9)]
    prefix = read_prefix(lm, context)
    before = order_indices(prefix.cache)
    prompts = [context + question for question in questions]
    rest = [[text(5, 6)]] * 3
    together = lm.continuations(prompts, rest, prefix=prefix)
    ((alone,),) = lm.continuations(prompts[:1], rest[:1], prefix=prefix)
    np.testing.assert_allclose(together[0][0].nll, alone.nll, atol=1e-4)
    unseen = QueryAgnostic(lm).with_movable([[(2, 40), (40, 90)]] * 3).continuations(prompts, rest)
    for one, other in zip(together, unseen, strict=True):
        np.testing.assert_array_equal(one[0].nll, other[0].nll)
    # What stays does not depend on the question, unlike at the end of a prompt.
    assert order_indices(prefix.cache) == before
    inside = order_indices(read_session(lm, [prompts[1]], 8).cache)
    assert [set(a) - set(range(90, 107)) for a in inside] != [set(a) for a in before]
    # By hand: read, cut, read on.
    session = read_session(lm, [context], 32)
    places = 90 + np.arange(17)[None]
    logits = session.read(np.array([questions[1]], np.int32), None, places)
    nll = -jax.nn.log_softmax(logits)[0, rest[0][0][0]]
    np.testing.assert_allclose(together[1][0].nll[0], nll, atol=1e-4)


def test_the_question_of_a_prompt_is_the_window_that_chooses(lm):
    """Finch with a question of n tokens is Finch with a window of n tokens."""
    finch = Finch(ratio=0.5, window=24)
    prompt, rest = text(1, 69), [[text(5, 6)]]
    few = lm.with_method(cache=dataclasses.replace(finch, window=8))  # all but the last token
    ((expected,),) = few.continuations([prompt], rest, prefix=read_prefix(few, prompt[:-1]))
    lm = lm.with_method(cache=finch)
    ((score,),) = QueryAware(lm).with_movable([[(0, 60)]]).continuations([prompt], rest)
    np.testing.assert_allclose(score.nll, expected.nll, atol=1e-5)
    with pytest.raises(InputError, match="question has 25 tokens, and model.cache.window=24"):
        read_prefix(lm, prompt, question=25)
    for method, kind in (
        (KeyDiff(ratio=0.5), "keydiff"),
        (Phases(Knorm(tokens=24)), "phases"),
        (Phases(SnapKV(tokens=24, window=8), KeyDiff(ratio=0.5)), "keydiff"),
        (DUO, "duo_attention"),
    ):
        with pytest.raises(InputError, match=f"type={kind} does not choose by the last tokens"):
            read_prefix(lm.with_method(cache=method), prompt, question=5)


def test_a_prefix_that_stays_whole_is_read_with_its_prompts(lm):
    assert read_prefix(lm.with_method(cache=KeyDiff(tokens=200)), text(1, 64)) is None
    assert read_prefix(lm.with_method(cache=KeyDiff(tokens=20, chunk=16)), text(1, 64)) is None


MIXED = (LayerKind(1, Sliding(16)), LayerKind(1))


@pytest.mark.parametrize(
    ("layers", "policy"),
    [
        (MIXED, KeyDiff(ratio=0.5)),
        pytest.param(
            *(MIXED, QFilter(ratio=0.5, file=filter_file(np.ones((1, 2, 16))))),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            None, Knorm(ratio=0.5, layers=LayerRatios((0.0, 0.5))), marks=pytest.mark.slow
        ),
    ],
    ids=["window", "window-file", "ratios"],
)
def test_a_prefix_is_cut_where_some_layers_keep_all_of_it(lm, layers, policy):
    config = lm.config.replace(cache=policy, **({"layers": layers} if layers else {}))
    mixed = LanguageModel(Decoder(config), lm.params, lm.tokenizer)
    context, questions = text(1, 60), [text(2, 3), text(3, 70)]
    prefix = read_prefix(mixed, context)
    prompts, rest = [context + question for question in questions], [[text(5, 6)]] * 2
    together = mixed.continuations(prompts, rest, prefix=prefix)
    session = read_session(mixed, [context], 80)
    for prompt, (score,) in zip(prompts, together, strict=True):
        ((alone,),) = mixed.continuations([prompt], rest[:1], prefix=prefix)
        np.testing.assert_allclose(score.nll, alone.nll, atol=1e-4)
    places = 60 + np.arange(9)[None]
    logits = session.read(np.array([[*questions[0], *rest[0][0]]], np.int32), None, places)
    nll = -jax.nn.log_softmax(logits)[0]
    longer = mixed.continuations(prompts[:1], [[[*rest[0][0], 7]]], prefix=prefix)
    np.testing.assert_allclose(longer[0][0].nll[-1], nll[7], atol=1e-4)


def test_a_window_beside_a_chunk_policy_counts_no_padding(lm):
    prompts, rest = [text(1, 20)], [[text(5, 4)]]  # with what follows, fewer than are kept
    config = lm.config.replace(layers=MIXED)
    plain, chunks = (
        LanguageModel(Decoder(config.replace(cache=cache)), lm.params, lm.tokenizer)
        for cache in (None, KeyDiff(tokens=24, chunk=16))
    )
    expected, actual = (m.continuations(prompts, rest)[0][0].nll for m in (plain, chunks))
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_a_question_after_a_prefix_does_not_move_the_cuts_of_other_rows(lm):
    # Without pooling, by which a large weight would give its neighbours scores that are equal but
    # for rounding.
    lm = lm.with_method(cache=SnapKV(tokens=40, window=8, pool=1, every=70))
    context, questions = text(1, 90), [text(2, 3), text(3, 100)]
    prefix, prompts = read_prefix(lm, context), [context + question for question in questions]
    held = []
    for rows in (prompts, prompts[:1]):
        options = {"num_new": 80, "chunk": 128, "prefix": prefix}
        _, session = read_prompts(lm, rows, lm.rotation(300), **options)
        for step, token in enumerate(text(4, 72)):
            tokens = np.full(len(rows), token, np.int32)
            places = np.array([[len(row) + step] for row in rows])
            session.read(tokens, None, places)
            if step in (8, 69, 71):
                held.append(order_indices(session.cache))
    assert held[:3] == held[3:]
    assert [len(layer[0]) for layer in held] == [52, 113, 42] * 2


def order_indices(cache):
    """Order indices of the tokens that each head of each layer keeps in row 0."""
    return [head for layer in cache.layers for head in order_indices_of(layer)]


# Configs and errors


def test_a_policy_in_a_file_of_the_user_is_a_config_key():
    file = Path(__file__).with_name("small_norm.py")
    words = ["--import", str(file), "--model.preset=tiny", "--tasks=[{type: niah}]"]
    words += ["--model.cache.type=small_norm", "--model.cache.tokens=48"]
    config = parse(EvalConfig, words)
    assert type(config.model.cache).__name__ == "SmallNorm" and config.model.cache.tokens == 48
    assert len(file.read_text().splitlines()) <= 60
    with pytest.raises(InputError, match=r"model.cache says .* leave it out here"):
        train(parse(TrainConfig, [*words[:3], *words[4:]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": "alibi"}, "model.cache is not defined for models with position=alibi"),
        ({"pattern": Landmark(block=4, top_k=1, train_length=32, token=3)},
         "model.cache.type=small_norm is not defined for layers under model.pattern.type=landmark"),
        ({"cache": "small_norm"}, "model.cache='small_norm' must be of type .*CacheMethod"),
    ],
)  # fmt: skip
def test_models_that_cannot_evict_tokens_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        TINY.replace(**{"cache": SmallNorm(tokens=8), **change})


def test_calls_that_a_policy_does_not_define_say_what_to_do(lm):
    for fields, message in (({"every": -1}, "model.cache.every=-1"),):
        with pytest.raises(InputError, match=message):
            SmallNorm(**fields)
    cut = lm.with_method(cache=SmallNorm(tokens=8))
    with pytest.raises(InputError, match=r"question=unseen or window needs a cache policy"):
        QueryAgnostic(lm)
    for reader, stop, message in (
        (QueryAgnostic, 0, "a prompt has no documents that could be cut before"),
        (QueryAware, 19, "a prompt has no question after its documents"),
    ):
        scorer = reader(lm.with_method(cache=SnapKV(tokens=8, window=4)))
        with pytest.raises(InputError, match=message):
            scorer.with_movable([[(0, stop)]]).generate([text(1, 20)], SIX)
    with pytest.raises(InputError, match=r"base sets question=unseen, and replug"):
        Method("base", question="unseen", replug=ReplugSplit())
    with pytest.raises(InputError, match=r"chunk=None evicts tokens at the end of a prompt"):
        cut.nll(np.array([text(1, 20)]))
    follows = cut.with_method(rope=lcjax.rope.DynamicNTK(factor=2.0, original_length=16))
    with pytest.raises(InputError, match="exact=True rotates keys again"):
        follows.generate([text(1, 20)], SIX, exact=True)
    assert not cut.shares_prefixes and math.isfinite(cut.continuations([[1]], [[[2]]])[0][0].nll[0])
