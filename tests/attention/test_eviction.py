"""Cache policies on one layer: scores and kept tokens of the released code, and budgets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_cache_golden import SCORES, filter_file, golden, head_file

from lcjax.attention import AttentionMetadata, CacheMethod, Causal, KeepAll
from lcjax.attention.budgets import (
    AcrossLayers,
    AdaptiveHeads,
    AdaptiveOriginal,
    Composite,
    Critical,
    HeadRates,
    LayerRatios,
    Pyramid,
    PyramidOriginal,
    TextParts,
    Threshold,
)
from lcjax.attention.cache import FullCache, LayerCache, LayerShape, Prompt, Tokens
from lcjax.attention.cache_storage import Int8
from lcjax.attention.candidates import Candidates
from lcjax.attention.channels import Channels
from lcjax.attention.eviction import CachePolicy, Evicting
from lcjax.attention.merging import Merging
from lcjax.attention.policies import (
    H2O,
    Compactor,
    Cur,
    DuoAttention,
    ExpectedAttention,
    Finch,
    KeyDiff,
    Knorm,
    KVzip,
    LagKV,
    LagKVOriginal,
    Leverage,
    ObservedAttention,
    Phases,
    QFilter,
    SimLayerKV,
    SnapKV,
    StreamingCache,
    Tova,
)
from lcjax.checkpoints import config_from_hf
from lcjax.errors import InputError
from lcjax.models import cache as cache_lib
from lcjax.models import preset
from lcjax.rope.rotation import no_rotation


def snapkv(ratio, window, kernel, **options):
    return SnapKV(ratio=ratio, window=window, pool=kernel, **options)


CASES = {  # name: policy
    "knorm.r50": Knorm(ratio=0.5),
    "knorm.repeats": Knorm(ratio=0.5),
    "knorm.rows": Knorm(ratio=0.4),
    "keydiff.r75": KeyDiff(ratio=0.75),
    "keydiff.rows": KeyDiff(ratio=0.5),
    "snapkv.w16_k5": snapkv(0.5, 16, 5),
    "snapkv.gqa3": snapkv(0.75, 8, 3),
    "snapkv.rows": snapkv(0.5, 8, 5),
    "pyramidkv.beta4": snapkv(0.5, 8, 5, layers=Pyramid(4)),
    "pyramidkv.falls_back": snapkv(0.5, 16, 5, layers=Pyramid(20)),
    "tova.r60": Tova(ratio=0.6),
    "tova.gqa3": Tova(ratio=0.8),
    "observed_attention.r50": ObservedAttention(ratio=0.5),
    "expected_attention.default": ExpectedAttention(ratio=0.5, future=64),
    "expected_attention.mean_only": ExpectedAttention(
        ratio=0.75, future=32, sinks=2, covariance=False, value_norm=False
    ),
    "expected_attention.epsilon": ExpectedAttention(ratio=0.5, epsilon=0.01),
    "lagkv.cross": LagKV(ratio=0.5, lag=16, cross=True),
    "lagkv.ranks": LagKV(ratio=0.5, lag=16),
    "lagkv.short": LagKV(ratio=0.5, lag=64),
    "streaming_llm.r75": StreamingCache(ratio=0.75),
    "adakv.snapkv": snapkv(0.5, 8, 5, heads=AdaptiveHeads(most=2)),
    "adakv.expected_attention": ExpectedAttention(
        ratio=0.75, future=64, epsilon=0.01, heads=AdaptiveHeads(most=2, floor=0.3)
    ),
    "chunkkv.snapkv": snapkv(0.5, 8, 5, span=10),
    "criticalkv.snapkv": snapkv(0.5, 8, 5, critical=Critical()),
    "critical_adakv.snapkv": snapkv(0.5, 8, 5, critical=Critical(), heads=AdaptiveHeads(most=2)),
    "finch.rerotated": Finch(ratio=0.5, window=12),
    "finch.chunks": Finch(ratio=0.5, window=8, part=20, positions="text"),
    "rerotation.snapkv": snapkv(0.5, 8, 5, positions="consecutive"),
    "dms.knorm": Knorm(threshold=Threshold(-4.6, window=16)),
    "lukv.snapkv": snapkv(
        0.5,
        8,
        5,
        heads=HeadRates(
            file=head_file(golden()[0]["cases"]["lukv.snapkv"]["params"]["keep_rates"])
        ),
    ),
    "per_layer.knorm": Knorm(ratio=0.5, layers=LayerRatios((0.25, 0.5, 0.75, 0.1))),
    **SCORES,
}


def empty(shapes, *rows):
    return jax.tree.map(lambda x: jnp.zeros((*rows, *x.shape), x.dtype), shapes)


class Layer:
    """One layer that reads unrotated queries and keys, and values [B, heads, T, H]."""

    def __init__(self, kind, rotation, num_heads, kv_shape, output_kernel=None, slots=0):
        rows, kv_heads, _, size = kv_shape
        self.kind, self.rotation, self.read = kind, rotation, 0
        self.output_kernel = output_kernel
        shape = LayerShape(num_heads, kv_heads, size, jnp.dtype("float32"))
        slots = slots or kind.slots
        self.arrays = empty(kind.arrays(shape, slots), rows)
        self.slots = empty(kind.shared(rows, slots))
        self.tokens = jnp.zeros(rows, jnp.int32)

    def __call__(self, q, k, v, is_token=None):
        """`is_token` [B, T] is false for padding."""
        rows, _, length, _ = q.shape
        is_token = np.ones((rows, length), bool) if is_token is None else is_token
        state = self.arrays, self.slots, self.read, self.tokens
        out, self.arrays, self.slots = _attend(
            self.kind, *state, is_token.astype(np.int32), q, k, v, self.rotation, self.output_kernel
        )
        self.read += length
        self.tokens += is_token.sum(1)
        return out

    def end_prompt(self, new=8):
        prompt = Prompt(self.tokens, self.rotation)
        ended = _end_prompt(self.kind, self.arrays, self.slots, prompt, new)
        self.kind, self.arrays, self.slots = ended.kind, ended.arrays, ended.slots
        return np.asarray(ended.scores)

    @property
    def order(self):
        """Order indices plus 1 of the tokens of heads that evict, int [B, K, S]."""
        name = "order" if "order" in self.arrays else "streaming.order"
        return np.asarray(self.arrays[name])[..., 0]

    def selected(self, total):
        """Which of `total` tokens are in the cache, bool [B, K, total]."""
        order = self.order
        return np.stack([[np.isin(np.arange(total) + 1, head) for head in row] for row in order])


@functools.partial(jax.jit, static_argnums=0)
def _attend(kind, arrays, slots, filled, read, segments, q, k, v, rotation, output_kernel):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    places = read[:, None] + jnp.cumsum(segments, axis=1, dtype=jnp.int32) - 1
    view = kind.reserve(slots, Tokens(segments, places, places), filled)
    metadata = view.update_metadata(AttentionMetadata(places, places, rotation=rotation))
    metadata = metadata.replace(output_kernel=output_kernel)
    out, arrays = kind.attend(arrays, q, k, v, Causal(), view, metadata)
    return out, arrays, view.slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Ended:
    """What a prompt leaves, and the scores by which it was cut."""

    scores: jax.Array
    arrays: dict
    slots: object
    kind: LayerCache = dataclasses.field(metadata={"static": True})


@functools.partial(jax.jit, static_argnums=(0, 4))
def _end_prompt(kind, arrays, slots, prompt, new):
    is_one = isinstance(kind, Evicting)  # not of two groups of heads
    scores = kind._scores(kind._candidates(arrays, prompt)) if is_one else jnp.zeros(())
    kind, arrays, slots = kind.end_prompt(arrays, slots, prompt, new, new)
    return Ended(scores, arrays, slots, kind)


def golden_layers(policy, case, *, length=None, chunk=None):
    """Yields layers of a case's model: number, layer, unrotated queries and keys, and values.

    All layers come as rows of one, [L x B, heads, T, H], unless the policy tells them apart.
    """
    document, arrays = golden()
    base = document["cases"][case]["base"]
    config = config_from_hf(document["models"][document["bases"][base]["model"]])
    rotated = [arrays[f"base.{base}.{name}"] for name in "qkv"]
    num_layers, _, num_heads, tokens, _ = rotated[0].shape
    length, back = length or tokens, -jnp.arange(tokens)[None]
    rotation = config.rotation(length)
    if not policy.differs_by_layer and policy.critical is None:
        rotated = [x.reshape(1, -1, *x.shape[2:]) for x in rotated]
    for number, (q, k, v) in enumerate(zip(*rotated, strict=True)):
        if 0 < number < num_layers - 1 and len(rotated[0]) > 1:
            continue  # each layer compiles programs of its own; the first and the last show all
        places = jnp.broadcast_to(back, (len(q), tokens))
        q, k = (rotation.rotate(x.swapaxes(1, 2), places).swapaxes(1, 2) for x in (q, k))
        kind, _ = Evicting(policy).for_layer(number, num_layers).fit(length, chunk or length)
        kernel = None
        if policy.critical is not None:
            name = document["bases"][base]["model"]
            kernel = arrays[f"model.{name}.model.layers.{number}.self_attn.o_proj.weight"]
            kernel = kernel.T.reshape(num_heads, k.shape[-1], -1)
        yield number, Layer(kind, rotation, num_heads, k.shape, kernel), q, k, v


@pytest.mark.parametrize("case", CASES)
def test_scores_and_survivors_are_those_of_the_released_code(case):
    document, arrays = golden()
    about, policy = document["cases"][case], CASES[case]
    with jax.default_matmul_precision("highest"):
        for number, layer, q, k, v in golden_layers(policy, case):
            layer(q, k, v)
            scores, selected = layer.end_prompt(), layer.selected(q.shape[2])
            is_one = policy.differs_by_layer or policy.critical is not None
            reference = arrays[f"{case}.kept"].astype(bool)
            expected = arrays.get(f"{case}.scores", reference)
            expected, reference = (
                x[number] if is_one else x.reshape(scores.shape) for x in (expected, reference)
            )
            free = np.isfinite(scores)
            is_ranked = not isinstance(policy, StreamingCache) and f"{case}.scores" in arrays
            if policy.span is policy.critical is None and is_ranked:
                np.testing.assert_allclose(scores[free], expected[free], rtol=2e-3, atol=2e-5)
            if about.get("tie_at_cut"):
                for row, head in np.ndindex(selected.shape[:2]):
                    ours, theirs = (
                        np.sort(expected[row, head][x[row, head]]) for x in (selected, reference)
                    )
                    np.testing.assert_allclose(ours, theirs)
            else:
                np.testing.assert_array_equal(selected, reference)


# The authors' own code, on random queries and keys


def original(name, policy, calls=None):
    """Returns tokens selected after each call, bool [call, B, K, T], and their golden form."""
    _, arrays = golden()
    q, k, v = (arrays.get(f"{name}.{x}") for x in "qkv")
    q = k if q is None else q  # LagKV reads no queries
    total, calls = k.shape[2], calls or [k.shape[2]]
    kind, _ = Evicting(policy).fit(total + 1, max(calls))
    layer = Layer(kind, no_rotation(), q.shape[1], k.shape)
    selected, outs, start = [], [], 0
    for number, size in enumerate(calls):
        outs.append(layer(*(x[:, :, start : start + size] for x in (q, k, v))))
        start += size
        if not number and policy.chunk is None:
            layer.end_prompt(total)
        selected.append(layer.selected(total))
    return np.stack(selected), arrays[f"{name}.kept"].astype(bool), np.concatenate(outs, 1)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("snapkv_original.max", SnapKV(tokens=30, window=8, pool=7, pooling="max")),
        ("h2o_prompt.gqa", H2O(tokens=28, recent=8)),
        ("tova_original.gqa", Tova(tokens=20, keep_last=False)),
        (
            "adakv_original.floor",
            SnapKV(tokens=32, window=8, pool=7, pooling="max", heads=AdaptiveOriginal()),
        ),
        (
            "adakv_original.normalized",
            SnapKV(tokens=24, window=8, pool=5, heads=AdaptiveOriginal(floor=0.5, normalized=True)),
        ),
    ],
)
def test_a_prompt_is_cut_as_by_the_authors(name, policy):
    with jax.default_matmul_precision("highest"):
        (selected,), expected, _ = original(name, policy)
    if "max" in name or golden()[0]["cases"][name].get("tie_at_cut"):  # equal scores of neighbours
        np.testing.assert_array_equal(selected.sum(-1), expected.sum(-1))
        assert (selected & expected).sum() >= 0.9 * expected.sum()
    else:
        np.testing.assert_array_equal(selected, expected)


def test_h2o_evicts_after_every_step_as_its_authors():
    _, arrays = golden()
    with jax.default_matmul_precision("highest"):
        selected, expected, out = original(
            "h2o.steps", H2O(tokens=14, recent=8, every=1), calls=[30, *[1] * 14]
        )
    np.testing.assert_array_equal(selected[0], expected[0])
    # The authors evict after a step, and lcjax before the next one.
    for step in range(1, 14):
        assert (selected[step + 1] & ~expected[step])[..., : 30 + step].sum() == 0
    np.testing.assert_allclose(out.swapaxes(1, 2), arrays["h2o.steps.out"], atol=2e-5)


def test_parts_of_a_text_are_cut_once_as_by_the_authors_of_lagkv():
    policy, calls = LagKVOriginal(ratio=0.5, sinks=4, lag=16), [40, 20, 1, 1, 30]
    selected, expected, _ = original("lagkv_original.calls", policy, calls)
    np.testing.assert_array_equal(selected, expected)


@pytest.mark.slow
def test_parts_of_lagkv_do_not_depend_on_chunks():
    make = functools.partial(LagKVOriginal, ratio=0.5, sinks=4, lag=16)
    calls_of = {make(): [60, 32], make(every=1): [40, *[1] * 52], make(chunk=46): [46, 46]}
    for policy, calls in calls_of.items():
        selected, expected, _ = original("lagkv_original.calls", policy, calls)
        np.testing.assert_array_equal(selected[-1], expected[-1])


def test_blocks_join_the_survivors_as_in_the_released_code():
    """The release reads a prompt in full first; so do the queries and keys given here."""
    _, arrays = golden()
    policy = KeyDiff(tokens=48, chunk=16)
    ((_, layer, *qkv),) = golden_layers(policy, "block.keydiff", chunk=16)
    with jax.default_matmul_precision("highest"):
        for start in range(0, 96, 16):
            layer(*(x[:, :, start : start + 16] for x in qkv))
    selected = layer.selected(96)
    expected = arrays["block.keydiff.kept"].astype(bool)
    np.testing.assert_array_equal(selected, expected.reshape(selected.shape))


def test_streaming_heads_see_their_slots_and_the_call_as_in_duo_attention():
    _, arrays = golden()
    qkv = [arrays[f"duo_attention.calls.{x}"] for x in "qkv"]
    method = DuoAttention(head_file([[0.9, 0.2]]), sinks=4, recent=10, chunk=30, every=1)
    kind, slots = method.layer_cache(Causal(), None).for_layer(0, 1).fit(45, 30)
    layer, outs, start = Layer(kind, no_rotation(), 4, qkv[1].shape, slots=slots), [], 0
    with jax.default_matmul_precision("highest"):
        for size in (30, 12, 1, 1, 1):
            outs.append(layer(*(x[:, :, start : start + size] for x in qkv)))
            start += size
    out = np.concatenate(outs, 1).swapaxes(1, 2)
    np.testing.assert_allclose(out, arrays["duo_attention.calls.out"], atol=2e-5)


@pytest.mark.parametrize("row", range(5))
def test_the_authors_pyramid(row):
    document, _ = golden()
    of = document["cases"]["pyramidkv_original.budgets"]["params"]["table"][row]
    policy = SnapKV(tokens=of["capacity"], window=of["window"], layers=PyramidOriginal(of["beta"]))
    counts = [policy.budgets(of["tokens"], (i, of["layers"]))[-1] for i in range(of["layers"])]
    assert counts == of["lengths"]


# Properties of all policies


def policies():
    """Every registered policy, and the axes that all of them share."""
    for kind in CacheMethod.get_known_choices().values():
        for fields in kind.examples if issubclass(kind, CachePolicy) else ():
            yield kind(**{"every": 4} | fields)
    filters = np.random.default_rng(2).normal(size=(3, 2, 8)).astype("f")
    yield QFilter(tokens=24, every=4, file=filter_file(filters))
    yield Knorm(threshold=Threshold(-2.5, window=6))
    yield Knorm(ratio=0.5, every=4, span=5)
    yield KeyDiff(tokens=24, every=4, heads=AdaptiveHeads())
    yield KeyDiff(ratio=0.5, every=4, part=12, heads=AdaptiveHeads(), critical=Critical())
    yield LagKV(ratio=0.4, every=4, part=20, lag=4, positions="consecutive")
    yield SnapKV(ratio=0.6, every=4, window=6, heads=AdaptiveHeads(most=1.5), pooling="max")
    yield SnapKV(tokens=24, every=4, window=6, positions="consecutive")
    yield SnapKV(tokens=24, every=4, window=6, heads=AdaptiveOriginal(normalized=True))
    yield H2O(tokens=24, every=4, recent=4, critical=Critical(), heads=AdaptiveHeads())
    yield Knorm(tokens=24, every=4, merge=Merging(0.1, 0.75))
    yield KeyDiff(tokens=24, every=4, channels=Channels(0.3, window=6), heads=AdaptiveHeads())


POLICIES = list(policies())
# Methods in which two policies, or a policy and a full cache, share a text
METHODS = [
    Phases(Knorm(tokens=24, every=4)),
    Phases(SnapKV(tokens=24, window=4, every=4), KeyDiff(ratio=0.4)),
    Phases(Knorm(threshold=Threshold(-2.5, window=6)), H2O(tokens=30, recent=4)),
    DuoAttention(head_file([[0.5, 0.4], [0.9, 0.2], [0.8, 0.7]]), sinks=3, recent=12, every=4),
]
SIZES = 4, 2, 8  # query heads, key heads, channels


def random_layer(method, rows, length, chunk):
    """A layer under a fitted method, with the rotation of a preset."""
    kind, slots = method.layer_cache(Causal(), 5.0).for_layer(1, 3).fit(length, chunk)
    rotation = preset("tiny").replace(num_heads=4, head_dim=8).rotation(length)
    kernel = None
    if kind.reads_output:
        kernel = np.random.default_rng(1).normal(size=(SIZES[0], SIZES[2], 16)).astype("f")
    return Layer(kind, rotation, SIZES[0], (rows, SIZES[1], length, SIZES[2]), kernel, slots)


def random_qkv(length):
    rng = np.random.default_rng(0)
    heads, kv_heads, size = SIZES
    return [rng.normal(size=(1, n, length, size)).astype("f") for n in (heads, kv_heads, kv_heads)]


def zero_pad(parts, before, after):
    return [np.pad(x, [(0, 0), (0, 0), (before, after), (0, 0)]) for x in parts]


def order_lists(layer):
    """Order indices plus 1 of the tokens that each head keeps, of each row."""
    return [[head[head > 0].tolist() for head in row] for row in layer.order]


def each_method(methods, is_quick):
    """Parameters; methods whose kind a quick one shares are slow."""
    marks = [[] if is_quick(method) else pytest.mark.slow for method in methods]
    return [
        pytest.param(method, id=f"{CacheMethod.get_choice_name(type(method))}-{number}", marks=mark)
        for number, (method, mark) in enumerate(zip(methods, marks, strict=True))
    ]


def is_first_of_its_arrays(policy):
    """One policy for each kind of own arrays, and each way to divide what stays."""
    kind = type(policy)
    if not isinstance(policy, CachePolicy):
        return policy in (METHODS[1], METHODS[3])
    if policy.merge is not None:
        return True
    if policy.channels is not None:
        return policy.heads is not None
    if policy.span or policy.heads or policy.critical:
        return policy.critical is not None or policy.span is not None
    if policy.part is not None:
        return False  # the one with `heads` shows it
    return kind in (SnapKV, ExpectedAttention, LagKV, Finch, Compactor) and policy == kind(
        every=4, **kind.examples[0]
    )


def can_be_cut_by_chunk(policy):
    return policy.cuts_text and policy.channels is None


@pytest.mark.parametrize("policy", each_method(POLICIES + METHODS, is_first_of_its_arrays))
def test_padding_and_other_rows_change_nothing(policy):
    """A row alone, behind padding, and in a batch, through a cut and four generated tokens."""
    total, steps, padding = 50, 9, 7
    qkv = random_qkv(total + steps)
    prompt, rest = ([x[:, :, part] for x in qkv] for part in (np.s_[:total], np.s_[total:]))
    alone = random_layer(policy, 1, total + steps, total)
    batch = random_layer(policy, 2, total + steps + padding, total + padding)
    by_chunk = policy.chunk is not None
    before, after = (0, padding) if by_chunk else (padding, 0)
    other = [np.concatenate([x[:, :, ::-1]] * 2, 2)[:, :, : total + padding] for x in prompt]
    padded = [np.concatenate(pair) for pair in zip(zero_pad(prompt, before, after), other)]
    is_token = np.ones((2, total + padding), bool)
    is_token[0, :before] = False
    is_token[0, total + before :] = False
    first = np.asarray(alone(*prompt)), np.asarray(batch(*padded, is_token))[:1]
    np.testing.assert_allclose(first[1][:, before : before + total], first[0], atol=1e-5)
    for layer in (alone, batch):
        layer.end_prompt(steps)
    assert order_lists(batch)[0] == order_lists(alone)[0]
    check_budget(policy, [len(head) for head in order_lists(alone)[0]], total)
    for step in range(steps):
        token = [x[:, :, step : step + 1] for x in rest]
        one, two = alone(*token), batch(*(np.concatenate([x, x]) for x in token))
        np.testing.assert_allclose(np.asarray(two)[:1], one, atol=1e-5)
        assert order_lists(batch)[0] == order_lists(alone)[0]


@pytest.mark.parametrize(
    "policy",
    each_method(
        [
            KeyDiff(ratio=0.5, part=20),
            Cur(ratio=0.4, part=16),
            StreamingCache(ratio=0.5, part=20),
            LagKV(ratio=0.5, part=20, lag=4),
            Leverage(ratio=0.5, part=20, sketch=6),
        ],
        lambda policy: isinstance(policy, KeyDiff),
    ),
)
def test_a_part_is_cut_as_a_text_of_its_own(policy):
    """Without rotations, which turn keys by their positions in their text."""
    qkv, size = random_qkv(3 * policy.part), policy.part
    whole = random_layer(policy, 1, 3 * size, 3 * size)
    whole.rotation = no_rotation()
    whole(*qkv)
    whole.end_prompt()
    alone = dataclasses.replace(policy, part=None)
    for start in range(0, 3 * size, size):
        layer = random_layer(alone, 1, size, size)
        layer.rotation = no_rotation()
        layer(*(x[:, :, start : start + size] for x in qkv))
        layer.end_prompt()
        for head, of_part in zip(order_lists(whole)[0], order_lists(layer)[0], strict=True):
            assert [i - start for i in head if start < i <= start + size] == of_part


def test_parts_keep_their_share_of_what_a_head_keeps():
    """With numbers whose products overflow int32."""
    tokens, count, size = 1_500_007, np.array([[700_001, 3]], np.int32), 4096
    index = jnp.zeros((1, 2, 8), jnp.int32)
    slots = Candidates(None, None, index, jnp.array([tokens]), None, {})
    found = np.asarray(TextParts(slots, size, tokens + 5000).divided(jnp.array(count)))[0]
    ends = np.minimum(np.arange(found.shape[1] + 1) * size, tokens)
    expected = [np.diff(int(n) * ends.astype(np.int64) // tokens) for n in count[0]]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("policy", [Compactor(tokens=24, block=8, sinks=3)], ids=["compactor"])
def test_a_prompt_is_cut_alike_however_many_tokens_are_read_at_once(policy):
    qkv = random_qkv(50)
    orders = []
    for sizes in ((50,), (13, 37)):
        layer, start = random_layer(policy, 1, 60, 50), 0
        for size in sizes:
            layer(*(x[:, :, start : start + size] for x in qkv))
            start += size
        layer.end_prompt()
        orders.append(order_lists(layer))
    assert orders[0] == orders[1]


def test_two_phases_of_one_policy_are_the_policy():
    """Also the queries of the second one move with the tokens that stay."""
    policy = SnapKV(tokens=24, every=4, window=6, positions="consecutive")
    layers = [random_layer(method, 1, 58, 50) for method in (policy, Phases(policy, policy))]
    for layer in layers:
        layer(*random_qkv(50))
        layer.end_prompt()
    for name, array in layers[0].arrays.items():
        np.testing.assert_allclose(layers[1].arrays[name], array, atol=1e-5)


@pytest.mark.parametrize(
    "policy",
    [
        KeyDiff(ratio=0.5, every=4),
        LagKVOriginal(ratio=0.5, sinks=2, lag=8),
        Knorm(ratio=0.5, every=4, span=5),
    ],
    ids=str,
)
def test_what_follows_a_cut_prefix_gets_its_share(policy):
    """A ratio counts all tokens read, not those of the prefix alone."""
    length, new = 48, 80
    qkv = random_qkv(length + new)
    layer = random_layer(policy, 1, length, length)
    layer(*(x[:, :, :length] for x in qkv))
    layer.end_prompt(0)
    settings = layer.kind, layer.arrays, layer.slots, 0, new, 1
    layer.kind, layer.arrays, layer.slots = type(layer.kind).extend_slots(*settings)
    for step in range(length, length + new):
        layer(*(x[:, :, step : step + 1] for x in qkv))
    expected = policy.budgets(length + new)[-1]
    span = policy.span or 0
    for head in order_lists(layer)[0]:
        assert expected - span <= len(head) <= expected + span + policy.every


def check_budget(policy, lengths, total):
    """As many tokens stay as the budget says; `lengths` are those of the heads of a row."""
    if isinstance(policy, DuoAttention):
        assert lengths == [policy.sinks + policy.recent]
        return
    if isinstance(policy, Phases):
        policy = policy.prompt or Knorm(tokens=total)
    if policy.lazy_tokens is not None:
        assert lengths == [policy.lazy_tokens] * len(lengths)
        return
    if policy.threshold is not None:
        assert all(policy.threshold.window < length < total for length in lengths)
        return
    count = policy.budgets(total)[-1]
    if policy.span is not None:
        assert abs(lengths[0] - count) <= policy.span and set(lengths) == {lengths[0]}
    elif policy.heads is not None:
        rounding = isinstance(policy.heads, AdaptiveOriginal) and 1.5 * len(lengths)
        assert abs(sum(lengths) - count * len(lengths)) <= rounding
        assert max(lengths) <= np.ceil(policy.heads.most * policy.budgets(total + 9).max())
    else:
        assert set(lengths) == {count}


@pytest.mark.parametrize(
    "policy", each_method(list(filter(can_be_cut_by_chunk, POLICIES)), is_first_of_its_arrays)
)
def test_chunks_are_cut_one_after_the_other(policy):
    """Memory stays within the budget and a chunk, and later tokens change no earlier output."""
    policy = dataclasses.replace(policy, chunk=16)
    has_tokens = policy.part is None and not isinstance(policy, LagKVOriginal)
    if policy.tokens is policy.threshold is None and has_tokens:
        policy = dataclasses.replace(policy, ratio=None, tokens=24)
    qkv = random_qkv(64)
    changed = [np.concatenate([x[:, :, :48], x[:, :, 48:] + 1], 2) for x in qkv]
    outs = []
    for parts in (qkv, changed):
        layer = random_layer(policy, 1, 64, 16)
        assert layer.kind.slots <= cache_lib.whole_blocks(layer.kind.num_kept + 16)
        outs.append([layer(*(x[:, :, i : i + 16] for x in parts)) for i in range(0, 64, 16)])
        most = layer.kind.num_kept
        assert all(len(head) <= most for head in order_lists(layer)[0])
    np.testing.assert_array_equal(outs[0][:3], outs[1][:3])


def test_a_ratio_of_zero_is_the_full_cache():
    for policy in POLICIES:
        if policy.layers is policy.channels is policy.lazy_tokens is None:
            whole = dataclasses.replace(policy, tokens=None, threshold=None, ratio=0.0)
            assert Evicting(whole).fit(64, 16) == (FullCache(), 64)


@pytest.mark.parametrize(
    ("ratio", "heads"),
    [
        (0.37, AcrossLayers(most=4.0)),
        (0.7, AcrossLayers(most=1.25)),
        (0.37, Composite(most=4.0)),
        (0.7, Composite(most=1.25)),
    ],
)
def test_heads_of_all_layers_share_a_budget_exactly(ratio, heads):
    """Together they lose int(L K T ratio) tokens, and no head has more than its slots.

    With composite tokens, layers keep int(L T (1 - ratio)) of these, the first one most.
    """
    policy = KVzip(ratio=ratio, heads=heads)
    kind, _ = Evicting(policy).fit(60, 60)
    rng, lengths = np.random.default_rng(0), np.array([53, 20])
    order = np.where(np.arange(60) < lengths[:, None], np.arange(60) + 1, 0)
    order = np.broadcast_to(order[:, None, :, None], (2, 2, 60, 1))
    layers = [
        {"keys": None, "values": None, "order": jnp.array(order), "received": jnp.array(scores)}
        for scores in np.linspace(1, 3, 3)[:, None, None, None, None] * rng.random((3, 2, 2, 60, 1))
    ]
    prompt = Prompt(jnp.array(lengths), no_rotation())
    counts = np.stack(kind.shared_counts([(kind, arrays, prompt) for arrays in layers]))
    assert counts.max() <= kind.num_kept and counts.min() >= 1
    if isinstance(heads, Composite):
        assert counts[..., 0].sum(0).tolist() == [int(3 * n * (1 - ratio)) for n in lengths]
        assert (counts[..., 0] == counts[..., 1]).all()
        assert (counts[0] >= counts[2]).all() and (counts[2] >= counts[1]).all()
        return
    assert counts.sum((0, 2)).tolist() == [6 * n - int(6 * n * ratio) for n in lengths]
    if heads.most == 4.0:  # the heads with the greatest scores keep most
        assert counts[0].sum() < counts[2].sum()


def test_a_ratio_keeps_what_float64_says():
    """100 (1 - 0.9) is 9.99... in float64 and 10.0 in float32."""
    for length, ratio, budget in ((100, 0.9, 9), (80, 0.8, 15), (120, 0.9, 11), (5, 0.9, 1)):
        assert Knorm(ratio=ratio).budgets(length)[-1] == budget


def rates_of(heads, columns):
    """The counts of a layer with another number of key heads than its file."""
    rates = HeadRates(file=head_file([[0.5] * columns]))
    return rates.counts(jnp.zeros((1, heads, 8)), None, 8, None, (0, 1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Finch(tokens=64, part=20), "part=20 gives each part .* share of ratio"),
        (lambda: Knorm(), "model.cache.type=knorm needs one of tokens.* need$"),
        (lambda: Knorm(tokens=4, ratio=0.5), "one of tokens.* and has tokens=4 and ratio=0.5"),
        (lambda: SnapKV(tokens=64, pool=4), "pool=4 must be odd"),
        (
            lambda: SnapKV(tokens=4, window=8),
            "keeps the last 8 tokens .* tokens=4",
        ),
        (lambda: Knorm(threshold=Threshold(0.0), span=2), "threshold leaves nothing to divide"),
        (
            lambda: Knorm(tokens=4, chunk=8, channels=Channels()),
            "chunk=8 .* leave chunk or channels",
        ),
        (lambda: Knorm(tokens=4, storage=Int8(), merge=Merging()), "storage=Int8.* round values"),
        (lambda: Knorm(tokens=4, critical=Critical(), merge=Merging()), "critical=.* or merge out"),
        (lambda: Knorm(tokens=4, storage=Int8(), channels=Channels()), "storage=Int8.* codes all"),
        (lambda: Phases(Knorm(tokens=4, channels=Channels())), "generation.channels drops .* all"),
        (lambda: LagKVOriginal(tokens=4), "lagkv_original evicts a share of each part"),
        (lambda: Phases(KeepAll()), "generation=KeepAll.* must be a policy that evicts tokens"),
        (lambda: Phases(Knorm(tokens=4, chunk=8)), "generation.chunk=8 .* leave chunk out"),
        (lambda: Knorm(tokens=4, span=2, heads=AdaptiveHeads()), "heads chooses .* span"),
        (
            lambda: Knorm(tokens=4, heads=AdaptiveOriginal(normalized=True)),
            "normalized=True weights heads by sums of attention, and type=knorm",
        ),
        (
            lambda: Knorm(tokens=4, positions="consecutive", heads=AdaptiveHeads()),
            "positions=consecutive .* leave model.cache.heads out",
        ),
        (lambda: Knorm(ratio=0.5, layers=LayerRatios((0.5,))).budgets(9, (0, 2)), "the 2 layers"),
        (lambda: Knorm(tokens=4, layers=LayerRatios((0.5,))), "tokens=4 has no effect .*ratio in"),
        (lambda: Knorm(ratio=0.5, span=10, layers=Pyramid()), "span=10 .* one of span and"),
        (lambda: Knorm(ratio=0.5, part=20, span=4), "span=4 chooses spans .* part=20"),
        (lambda: rates_of(2, 1), "1 numbers in a line, and the model has 2 key heads"),
        (lambda: SimLayerKV(span=2), "lazy_threshold leaves nothing to divide"),
        (
            lambda: SimLayerKV(recent=4, last_queries=4),
            "last_queries=4 must be fewer than recent=4",
        ),
        (lambda: SimLayerKV(positions="consecutive"), "lazy ones keep fewer .* use positions=text"),
        (lambda: StreamingCache(tokens=3), "tokens=3 has no room for sinks=4"),
        (
            lambda: Phases(LagKVOriginal(ratio=0.5), Knorm(tokens=4)),
            "generation of type lagkv_original .* leave prompt out",
        ),
    ],
)
def test_bad_settings_say_what_to_write(make, words):
    with pytest.raises(InputError, match=words):
        make()
