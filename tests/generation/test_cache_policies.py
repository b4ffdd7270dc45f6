"""Cache policies: what is kept, what it costs, and that no row notices its batch."""

import dataclasses
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_policy_support import (
    DUO,
    LAZY,
    SIX,
    THIN,
    TINY,
    held_tokens,
    named,
    read_session,
    small_model,
    text,
)
from installed_compilers import needs_cuda_plugin
from kv_cache_golden import filter_file, head_file
from small_norm import SmallNorm

import lcjax
from lcjax import checkpoints, cost
from lcjax.attention import (
    AdaptiveHeads,
    CachePolicy,
    Channels,
    Critical,
    HeadRates,
    KeepAll,
    Landmark,
    LayerRatios,
    Merging,
    Sliding,
    Threshold,
    TurboQuant,
)
from lcjax.attention.cache import FullCache, Prompt
from lcjax.attention.policies import (
    Cap,
    Compactor,
    Cur,
    DuoAttention,
    ExpectedAttention,
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
)
from lcjax.config import parse
from lcjax.cost.chips import Topology
from lcjax.cost.compilers import devices
from lcjax.cost.program import collectives
from lcjax.errors import InputError
from lcjax.evaluation import EvalConfig
from lcjax.evaluation.eval_config import Method
from lcjax.evaluation.measure import Stopwatch
from lcjax.evaluation.split import ReplugSplit
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.readings import Readings
from lcjax.generation.session import lower_cut, lower_read
from lcjax.generation.shared_prefix import QueryAgnostic, QueryAware
from lcjax.models import Decoder, LayerKind
from lcjax.models import cache as cache_lib
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.training import TrainConfig
from lcjax.training import run as train

THINK = ThinK(every=4, channels=Channels(window=8))


@dataclasses.dataclass(frozen=True)
class Newest(CachePolicy):
    def score(self, slots):
        return slots.index.astype(jnp.float32)


@pytest.fixture(scope="module")
def lm():
    return small_model()


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


OTHER_MODELS = [
    (DuoAttention(head_file([[0.5, 0.1]])), "has 1 lines, and the model has 2 layers"),
    (DuoAttention(head_file([[0.5] * 3] * 2)), "scores of 3 key heads, and the model has 2"),
    (DuoAttention("/absent.tsv"), "No such file.*; give the authors' .tsv .* train.head_gates"),
    (DuoAttention(__file__), "is no table of numbers.*; give the authors' .tsv of this model"),
    (QFilter(tokens=9, file="/absent"), "No such file.*; write_query_filters .* makes one"),
    (QFilter(tokens=9, file=filter_file(np.ones((2, 3, 16)))), "of 3 key heads, .* of this model"),
    (Phases(QFilter(tokens=9, file="/absent")), "No such file"),
    (Knorm(ratio=0.5, heads=HeadRates(file="/absent")), "heads.file=/absent .*; give LU-KV's"),
    (Knorm(ratio=0.5, heads=HeadRates(file=head_file([[0.5] * 3] * 2))), "3 numbers in a line"),
    (Knorm(ratio=0.5, heads=HeadRates(file=head_file([[0.5] * 2]))), "has 1 lines"),
    (Knorm(ratio=0.5, layers=LayerRatios((0.5,))), "the 2 layers"),
    (KeepAll(TurboQuant(exact_layers=0)), "head_dim=16 must be 32"),
]


@pytest.mark.parametrize(("method", "words"), OTHER_MODELS)
def test_a_method_of_another_model_or_without_its_file_is_refused_before_weights_are_read(
    lm, folder, monkeypatch, method, words
):
    monkeypatch.setattr(checkpoints, "load", lambda *_, **__: pytest.fail("weights were read"))
    for refuse in (
        lambda: LanguageModel.load(folder, cache=method),
        lambda: LanguageModel.load(lcjax.ModelSection(preset="tiny", cache=method)),
        lambda: lm.with_method(cache=method),
        lambda: lm.with_method(cache=SnapKV(ratio=0.5)).with_method(cache=method),
    ):
        with pytest.raises(InputError, match=words) as error:
            refuse()
        assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def folder(lm, tmp_path_factory):
    return str(lm.save(tmp_path_factory.mktemp("model") / "tiny"))


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
    mesh = make_mesh(Mesh(fsdp=2, tensor=2, context=2))
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


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(tokens=512, window=8),
        pytest.param(KeyDiff(tokens=1024, heads=AdaptiveHeads()), marks=pytest.mark.slow),
        pytest.param(Knorm(tokens=512, critical=Critical()), marks=pytest.mark.slow),
        pytest.param(ExpectedAttention(tokens=512), marks=pytest.mark.slow),
        pytest.param(Newest(tokens=512, positions="consecutive"), marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_a_generated_token_copies_no_cache(policy, rows):
    assert_copies_no_cache(policy, rows, jax.devices()[:1])


@pytest.mark.slow
@needs_cuda_plugin
def test_a_generated_token_copies_no_cache_of_a_gpu():
    assert_copies_no_cache(SnapKV(tokens=512, window=8), 1, devices(Topology.parse("h100:1")))


def assert_copies_no_cache(policy, rows, on):
    config, mesh = TINY.replace(cache=policy, num_layers=1), make_mesh(Mesh(fsdp=1), on)
    program = lower_read(config, mesh, rows, 4096, 1).compile().as_text()
    _, entry = program.split("ENTRY ")
    shapes = re.findall(r"copy[.\d]* = \w+\[([\d,]+)\]", entry)  # copies and fusions of one
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    keys = rows * TINY.num_kv_heads * 512 * TINY.head_dim
    assert max(sizes, default=0) < keys


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


def test_prompts_that_are_more_than_the_space_are_not_all_read_again(lm):
    """Three prompts that methods read in turn, and space for two of one method."""

    def read_all(model, method):
        for seed in (1, 2, 3):
            model.with_method(cache=method).continuations([text(seed, 60)], [[text(9, 8)]])

    def seconds(model):
        before = model.readings.saved_seconds
        read_all(model, KeyDiff(ratio=0.25))
        return model.readings.saved_seconds - before

    model = lm.with_method()
    model.readings = Readings(10**9, Stopwatch)
    read_all(model, KeyDiff(ratio=0.5))
    sizes = [sum(x.nbytes for x in jax.tree.leaves(x[:2])) for x in model.readings]
    model.readings = Readings(int(2.5 * max(sizes)), Stopwatch)
    read_all(model, KeyDiff(ratio=0.5))
    assert len(model.readings) == 2 and seconds(model) > 0
    # Those of another method make way.
    read_all(model, SnapKV(ratio=0.5, window=8))
    assert len(model.readings) == 2 and seconds(model) == 0


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
        ({"cache": "small_norm"},
         "model.cache='small_norm' must be an instance of CacheMethod; pass small_norm.SmallNorm"),
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
