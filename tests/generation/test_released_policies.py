"""Cache policies against the arrays of released code."""

import functools
import json

import numpy as np
import pytest
from cache_policy_support import KVZIP, Requests, held_tokens, read_session
from kv_cache_golden import SCORES, golden, head_file
from safetensors.numpy import load_file, save_file
from small_norm import SmallNorm

from lcjax.attention import Channels, Merging, Sliding, Threshold
from lcjax.attention.budgets import AcrossLayers, AdaptiveHeads, Composite
from lcjax.attention.policies import (
    DuoAttention,
    Finch,
    KeyDiff,
    Knorm,
    KVCompose,
    KVzip,
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
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.query_filters import write_query_filters
from lcjax.models import Decoder, LayerKind


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


@pytest.mark.parametrize("golden_lm", ["llama"], indirect=True)
def test_turns_of_different_length_are_cut_as_in_the_released_code(golden_lm):
    document, arrays = golden()
    of, ids = document["cases"]["chunked.tova"]["params"], arrays["base.llama96.ids"]
    lm = golden_lm.with_method(cache=Tova(tokens=of["target"]))
    start, *calls = of["calls"]
    session = read_session(lm, ids[:, :start], sum(calls))
    for size in calls:
        places = np.arange(start, start + size)[None]
        logits = session.read(ids[:, start : start + size], None, places)
        start += size
        expected = arrays["chunked.tova.logits"][:, start - 1]
        np.testing.assert_allclose(logits, expected, atol=2e-4)
        session.end_prompt(ids.shape[1] - start, max(calls))


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


def heads_of(mask):
    """The indices (layer, row, head) of a mask of tokens, bool [L, B, K, T]."""
    return list(np.ndindex(mask.shape[:3]))


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
        with pytest.raises(InputError, match=words):
            golden_lm.with_method(cache=QFilter(tokens=20, file=str(name)))
