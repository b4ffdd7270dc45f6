"""Models whose caches keep codes: no result depends on how a text is read."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_lm import sharp_decoder

from lcjax import cost
from lcjax.attention import Fp8, Int8, KeepAll, KeyDiff, Kivi, Knorm, Landmark, Sliding, TurboQuant
from lcjax.attention.budgets import AcrossLayers, LayerRatios
from lcjax.config import parse
from lcjax.errors import InputError
from lcjax.evaluation import EvalConfig
from lcjax.generation.conversation import Conversation
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.generation.session import Session
from lcjax.generation.shared_prefix import read_prefix
from lcjax.models import Decoder, LayerKind, preset
from lcjax.models import cache as cache_lib
from lcjax.parallel.sharding import Mesh, make_mesh

TINY = preset("tiny").replace(head_dim=32, qk_norm="head", attention_soft_cap=20.0)
SIX = Sampling(max_new_tokens=6, min_new_tokens=6)
STORAGES = [
    Int8(),
    pytest.param(Fp8(), marks=pytest.mark.slow),
    pytest.param(TurboQuant(exact_layers=0), marks=pytest.mark.slow),
]
each_storage = pytest.mark.parametrize(
    "storage", STORAGES, ids=lambda storage: type(storage).__name__
)


@pytest.fixture(scope="module")
def lm():
    return sharp_decoder(TINY)


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def close(actual, expected):
    """Rounding before a code may change that code, and so a score a little."""
    np.testing.assert_allclose(actual, expected, atol=2e-2)
    assert np.median(np.abs(np.asarray(actual) - np.asarray(expected))) < 1e-4


@each_storage
def test_results_do_not_depend_on_calls_batches_or_padding(lm, storage):
    coded = lm.with_method(cache=KeepAll(storage))
    prompts, rest = [text(1, 70), text(2, 33)], [[text(4, 9)]] * 2
    together = [row[0].nll for row in coded.continuations(prompts, rest)]
    whole = coded.nll(np.array([prompts[0] + rest[0][0]]))[0]
    close(together[0], whole[70:])  # what a prompt and its continuation are as one text
    for prompt, ids, nll in zip(prompts, rest, together):
        close(nll, coded.continuations([prompt], [ids])[0][0].nll)
    exact = [row[0].nll for row in lm.continuations(prompts, rest)]
    differences = np.abs(np.subtract(together, exact))
    assert 1e-4 < differences.max() < (2.0 if isinstance(storage, TurboQuant) else 0.3)
    read = []
    for size in (72, 9):
        cache = cache_lib.create(coded.model.config, 1, 80, chunk=size)
        session = Session(coded.model, coded.params, cache, coded.rotation(80))
        ids = np.array([text(1, 72)], np.int32)
        sizes = [size] * (72 // size)
        logits = session.read(ids, None, np.arange(72)[None], sizes=sizes)
        read.append(np.asarray(jax.nn.log_softmax(logits)))
    close(*read)


@pytest.mark.slow  # a minute of compiling
@each_storage
def test_a_prefix_a_conversation_and_a_mesh_read_the_codes(lm, storage, tmp_path):
    coded = lm.with_method(cache=KeepAll(storage))
    prefix = text(1, 60)
    prompts, rest = [prefix + text(5, 4), prefix + text(6, 9)], [[text(4, 5)]] * 2
    alone = coded.continuations(prompts, rest)
    shared = coded.continuations(prompts, rest, prefix=read_prefix(coded, prefix))
    for one, other in zip(alone, shared):
        close(other[0].nll, one[0].nll)
    params = jax.tree.map(np.asarray, coded.params)
    config = coded.config.replace(scan_layers=False)
    for axes in ({"fsdp": 2}, {"context": 2}):  # of rows and weights, or of slots
        mesh = make_mesh(Mesh(tensor=2, **axes), jax.devices()[:4])
        sharded = LanguageModel(Decoder(config, mesh), params, coded.tokenizer)
        for one, other in zip(alone, sharded.continuations(prompts, rest)):
            close(other[0].nll, one[0].nll)
    talk = Conversation(coded, length=128)
    talk.read(prompts[0][:30])
    talk.write(SIX)
    talk.save(tmp_path / "talk")
    opened = Conversation.open(coded, tmp_path / "talk")
    for each in (talk, opened):
        each.read(prompts[0][30:])
        each.write(SIX)
    assert opened.tokens == talk.tokens
    jax.tree.map(np.testing.assert_array_equal, opened._session.cache, talk._session.cache)
    talk = Conversation(coded, length=128)
    talk.read(prompts[0])
    assert talk.write(SIX).ids == coded.generate(prompts[:1], SIX)[0].ids


@pytest.mark.slow  # tests/attention/test_cache_storage.py has the quick proof of one layer
def test_kivi_reads_a_row_as_it_is_read_alone_and_on_a_mesh(lm):
    coded = lm.with_method(cache=KeepAll(Kivi(residual=32)))
    prompts, rest = [text(1, 90), text(2, 53)], [[text(4, 40)]] * 2
    together = [row[0].nll for row in coded.continuations(prompts, rest)]
    for prompt, ids, nll in zip(prompts, rest, together):
        close(nll, coded.continuations([prompt], [ids])[0][0].nll)
    mesh = make_mesh(Mesh(fsdp=2, tensor=2), jax.devices()[:4])
    params = jax.tree.map(np.asarray, coded.params)
    config = coded.config.replace(scan_layers=False)
    sharded = LanguageModel(Decoder(config, mesh), params, coded.tokenizer)
    for nll, other in zip(together, sharded.continuations(prompts, rest)):
        close(other[0].nll, nll)
    assert not coded.shares_prefixes
    talk = Conversation(coded, length=256)
    for turn in range(2):
        talk.read(text(turn, 60))
        assert len(talk.write(SIX).ids) == 6


@pytest.mark.parametrize(
    "policy", [KeyDiff(tokens=24, every=4, storage=Int8()),
               pytest.param(KeyDiff(tokens=24, chunk=16, every=4, storage=TurboQuant()),
                            marks=pytest.mark.slow)], ids=["int8", "turboquant"])  # fmt: skip
def test_codes_move_with_the_tokens_that_a_policy_keeps(lm, policy):
    coded = lm.with_method(cache=policy)
    prompts, rest = [text(1, 60), text(2, 41)], [[text(4, 9)]] * 2
    together = [row[0].nll for row in coded.continuations(prompts, rest)]
    for prompt, ids, nll in zip(prompts, rest, together):
        close(nll, coded.continuations([prompt], [ids])[0][0].nll)
    cache = cache_lib.create(coded.model.config, 1, 128, chunk=16)
    assert {"keys", "order"} <= set(cache.layers[0]) and cache.kinds[0].evicts


def test_exact_layers_share_a_budget_with_layers_of_codes(lm):
    policy = Knorm(ratio=0.5, heads=AcrossLayers(), storage=TurboQuant(exact_layers=1))
    config = lm.config.replace(num_layers=3, scan_layers=False, cache=policy)
    cache = cache_lib.create(config, 1, 64, chunk=64)
    keys = np.random.default_rng(0).normal(size=(1, 2, 64, 32)).astype("f")
    order = np.broadcast_to(np.arange(1, 65, dtype=np.int32)[:, None], (1, 2, 64, 1))
    layers = tuple(
        cache.kinds[kind].storage.encode(keys, keys) | {"order": order}
        for kind in cache.kind_by_layer
    )
    cache = dataclasses.replace(cache, layers=layers, tokens=np.array([64], np.int32))
    cut = cache_lib.end_prompt(cache, [config.rotation(64)] * 3, 8, 1)
    counts = [int((layer["order"] > 0).sum()) for layer in cut.layers]
    assert sum(counts) == 3 * 64 and max(counts) - min(counts) <= 6, counts


def test_bytes_are_those_of_codes_and_scales(lm):
    config = lm.config.replace(num_layers=6, dtype="bfloat16")
    for storage, bits in ((Int8(), 8 + 32 / 32), (Fp8(), 9), (TurboQuant(exact_layers=0), 4.75)):
        coded = config.replace(cache=KeepAll(storage))
        memory = cost.generation_memory(coded, 1024, 1, Mesh(fsdp=1)).cache
        created = cache_lib.create(coded, 1, 1024)
        assert memory == sum(x.nbytes for x in jax.tree.leaves(created.layers))
        assert memory == 6 * 1024 * 2 * 2 * 32 * bits / 8
    created = cache_lib.create(
        config.replace(cache=KeepAll(TurboQuant()), scan_layers=False), 1, 64
    )
    assert [layer["keys"].dtype.name for layer in created.layers] == (
        ["bfloat16"] * 2 + ["int32"] * 2 + ["bfloat16"] * 2
    )


def test_rings_keep_codes_too(lm):
    layers = (LayerKind(1, Sliding(window=16)), LayerKind(1))
    mixed = lm.config.replace(layers=layers, cache=KeepAll(Int8()), scan_layers=False)
    windowed = LanguageModel(Decoder(mixed), lm.params, lm.tokenizer)
    cache = cache_lib.create(mixed, 1, 512, chunk=32)
    assert [layer["keys"].shape[2] for layer in cache.layers] == [64, 512]
    assert {layer["keys"].dtype.name for layer in cache.layers} == {"int8"}
    ids = np.array([text(1, 200)])
    nll = windowed.nll(ids)
    plain = LanguageModel(Decoder(mixed.replace(cache=None)), lm.params, lm.tokenizer).nll(ids)
    assert 1e-4 < np.abs(nll - plain).max() < 0.3


@pytest.mark.parametrize("storage", [Int8(), TurboQuant(exact_layers=1)], ids=["int8", "by_layer"])
def test_budgets_count_the_layers_that_evict_and_codes_count_all(lm, storage):
    layers = (LayerKind(1, Sliding(window=16)), LayerKind(1))
    policy = Knorm(ratio=0.5, layers=LayerRatios((0.2, 0.8)), storage=storage)
    caches = cache_lib.layer_caches(lm.config.replace(layers=layers, num_layers=4, cache=policy))
    assert [getattr(cache, "layer", None) for cache in caches] == [None, (0, 2), None, (1, 2)]
    is_exact = [cache.storage.is_exact for cache in caches]
    assert is_exact == [storage != Int8(), False, False, storage != Int8()]


def test_a_storage_is_a_config_section():
    words = ["--model.preset=tiny", "--tasks=[{type: niah}]", "--model.cache.type=full"]
    config = parse(EvalConfig, [*words, "--model.cache.storage.type=turboquant",
                                "--model.cache.storage.key_bits=3"])  # fmt: skip
    assert config.model.cache == KeepAll(TurboQuant(key_bits=3))
    assert KeepAll().is_exact and not config.model.cache.is_exact


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": "alibi"}, "model.cache is not defined for models with position=alibi"),
        ({"pattern": Landmark(block=4, top_k=1, train_length=32, token=3)},
         "storage.type=int8 keeps codes of rotated keys, and model.pattern.type=landmark"),
    ],
)  # fmt: skip
def test_models_without_codes_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        TINY.replace(attention_soft_cap=None, qk_norm="none", cache=KeepAll(Int8()), **change)
    with pytest.raises(InputError, match="storage.type=kivi codes several tokens together"):
        Knorm(tokens=8, storage=Kivi())
    with pytest.raises(InputError, match="positions=consecutive turns the keys"):
        Knorm(tokens=8, storage=Int8(), positions="consecutive")
