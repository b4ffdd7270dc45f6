"""Budgets of `vertical_slash` for each head and layer, and their search, as in MInference."""

import dataclasses
import functools
import json

import attention_golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_golden as golden
from test_vertical_slash import naive, qkv
from tiny_lm import ids, sharp_lm

from lcjax import config as config_lib
from lcjax.attention import Longformer, Sliding, SparseHead, VerticalSlash, search_head_budgets
from lcjax.attention import vertical_slash as module
from lcjax.errors import InputError
from lcjax.generation.head_budgets import HeadBudgetSearch, head_budgets, search
from lcjax.models import LayerKind, preset


def test_columns_and_diagonals_of_each_head_equal_those_of_the_authors_code():
    case = "minference.vertical_slash"
    x, params = golden.arrays(case), golden.params(case)
    heads = golden.heads(case, 1)
    length = len(heads[0].q)
    at, ones = jnp.arange(length), jnp.ones(length, jnp.int32)
    place = module._HeadMetadata(at, at, at, ones, ones)
    scores = jax.jit(lambda q, k: module._scores(q, k, place))
    scores = zip(*(scores(head.q, head.k) for head in heads), strict=True)
    for got, name, budget in zip(
        scores, ("columns", "diagonals"), ("vertical", "slash"), strict=True
    ):
        _, mask = module._top_k(jnp.stack(got), np.array(params[budget]))
        for head in range(len(heads)):
            want = x[name][0, head]
            assert set(np.flatnonzero(mask[head])) == set(want[want >= 0])


def test_block_sparse_heads_equal_the_authors_code():
    case = "minference.block_sparse"
    x, params = golden.arrays(case), golden.params(case)
    head = SparseHead("block_sparse", params["topk"])
    got = golden.attend(VerticalSlash(heads=(head,) * 2), x["q"], x["k"], x["v"])
    np.testing.assert_allclose(got, x["out"], **attention_golden.TOLERANCE)
    past = np.tril(np.ones((5, 5), bool))
    choose = functools.partial(module._best_blocks, count=params["topk"], block=64)
    for number, head in enumerate(golden.heads(case, 64)):
        chosen = np.asarray(choose(head.q, head.k, jnp.arange(5)))
        np.testing.assert_array_equal(chosen & past, x["chosen"][0, number] & past)
    assert not x["chosen"][0].diagonal(axis1=1, axis2=2).all()  # a token may not see itself


def test_stream_llm_heads_and_longformer_are_the_a_shape_of_the_authors_code():
    case = "minference.shapes"
    x, params = golden.arrays(case), golden.params(case)
    head = SparseHead("stream_llm", params["init"], params["window"])
    longformer = Longformer(params["window"], tuple(range(params["init"])))
    for pattern in (VerticalSlash(heads=(head,) * 2), longformer):
        got = golden.attend(pattern, x["q"], x["k"], x["v"])
        np.testing.assert_allclose(got, x["out_a_shape"], **attention_golden.TOLERANCE)


SEARCH = golden.params("minference.search")
CANDIDATES = tuple(SparseHead(*candidate) for candidate in SEARCH["candidates"])


def test_attention_mass_equals_that_of_the_authors_search():
    x = golden.arrays("minference.search")
    q, k = x["q"][0], x["k"][0]
    masses = module.attention_mass(q, k, CANDIDATES, SEARCH["start"])
    np.testing.assert_allclose(masses, x["mass"], **attention_golden.TOLERANCE)
    budgets = search_head_budgets(q, k, CANDIDATES, SEARCH["start"])
    assert list(budgets) == ["0", "1", "2", "3"]
    for head, (kind, vertical, slash, share) in enumerate(budgets.values()):
        best = CANDIDATES[x["mass"][head].argmax()]
        assert SparseHead(kind, vertical, slash) == best
        assert share == pytest.approx(x["mass"][head].max(), abs=1e-5)


def test_winners_are_written_as_the_released_code_writes_them():
    candidates = (SparseHead("stream_llm", 100, 800), SparseHead("block_sparse", 8, 1))
    masses = np.array([[0.9, 0.1], [0.25, 0.5]])
    assert module.best_budgets(masses, candidates) == {
        "0": ["vertical_and_slash", 100, 800, 0.9],
        "1": ["vertical_and_slash", 1000, 6096, 0.5],
    }
    with pytest.raises(InputError, match="has 9 tokens, and the first 9 do not count"):
        search_head_budgets(np.zeros((9, 2, 4)), np.zeros((9, 1, 4)), candidates, 9)


MIXED = (
    SparseHead("vertical_and_slash", 40, 120),
    SparseHead("stream_llm", 20, 70),
    SparseHead("block_sparse", 2, 0),
    SparseHead("vertical_and_slash", 30, 104),
)


def test_every_head_has_its_own_budget():
    q, k, v = qkv()
    got = golden.attend(VerticalSlash(heads=MIXED), q, k, v)[0]
    for head in (0, 3):
        want, other = (
            naive(q, k, v, *dataclasses.astuple(MIXED[x])[1:])[0][:, head] for x in (head, 3 - head)
        )
        np.testing.assert_allclose(got[:, head], want, **attention_golden.TOLERANCE)
        assert np.abs(want - other).max() > 1e-3
    length = q.shape[1]
    away = np.subtract.outer(np.arange(length), np.arange(length))
    size = -(-length // 64) * 64
    q_means, k_means = (
        np.pad(x, [(0, size - length), (0, 0)]).reshape(-1, 64, x.shape[-1]).mean(1)
        for x in (q[0, :, 2], k[0, :, 1])
    )
    past = np.tril(np.ones((len(q_means),) * 2, bool))
    scores = np.where(past, q_means @ k_means.T, -np.inf)
    best = (-scores).argsort(1, kind="stable").argsort(1, kind="stable") < 2
    blocks = np.arange(length) // 64
    visible = {1: (away < 70) | (np.arange(length) < 20), 2: best[blocks][:, blocks]}
    for head, seen in visible.items():
        logits = q[0, :, head] @ k[0, :, head // 2].T / 4
        weights = np.where(seen & (away >= 0), np.exp(logits), 0)
        total = weights.sum(-1, keepdims=True)
        want = (weights / np.where(total, total, 1)) @ v[0, :, head // 2]
        np.testing.assert_allclose(got[:, head], want, **attention_golden.TOLERANCE)


def test_stream_and_block_sparse_heads_see_the_same_in_packed_and_padded_rows():
    heads = (SparseHead("stream_llm", 20, 50), SparseHead("block_sparse", 1, 0)) * 2
    pattern, arrays = VerticalSlash(heads=heads), qkv()
    segments = np.zeros((2, 270), np.int32)
    segments[0, :150], segments[0, 150:] = 1, 2
    segments[1, 120:] = 1  # padding before it
    rows = [np.concatenate([x[:, :270], np.roll(x[:, :270], 120, axis=1)]) for x in arrays]
    out = np.asarray(golden.attend(pattern, *rows, segments))
    for part, (row, number) in ((slice(0, 150), (0, 1)), (slice(150, 270), (0, 2))):
        alone = golden.attend(pattern, *(x[:, part] for x in arrays))[0]
        np.testing.assert_allclose(out[row, segments[row] == number], alone, rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(out[1, 120:], out[0, :150], rtol=1e-5, atol=3e-6)
    assert not out[1, :120].any()


def write_budgets(path, layers):
    """A file with the heads of each layer."""
    entries = [
        {str(i): [*dataclasses.astuple(head), 0.5] for i, head in enumerate(heads)}
        for heads in layers
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def test_a_file_has_the_heads_of_each_layer(tmp_path):
    layers = [MIXED, MIXED[::-1], MIXED]
    pattern = VerticalSlash(file=write_budgets(tmp_path / "heads.json", layers))
    config = preset("tiny").replace(num_layers=3, pattern=pattern)
    assert [config.layer(i).pattern.heads for i in range(3)] == layers
    assert config.kind_by_layer == (0, 1, 0) and not config.stacked
    assert config.needs_whole_prompt and not config.is_position_based
    windows = config.replace(layers=(LayerKind(pattern=Sliding(8)), LayerKind(repeat=2)))
    assert windows.layer(0).pattern == Sliding(8)
    assert [windows.layer(i).pattern.heads for i in (1, 2)] == layers[1:]
    one = [MIXED]
    single = VerticalSlash(file=write_budgets(tmp_path / "one.json", one))
    assert config.replace(num_layers=1, pattern=single).layer(0).pattern.heads == MIXED


def test_files_of_another_model_raise_input_error(tmp_path):
    file = write_budgets(tmp_path / "heads.json", [MIXED])
    with pytest.raises(InputError, match="has heads of 1 layers, and the model has 2"):
        preset("tiny").replace(num_layers=2, pattern=VerticalSlash(file=file))
    with pytest.raises(InputError, match="leave pattern.heads out"):
        VerticalSlash(file=file, heads=MIXED)
    x = golden.arrays("minference.vertical_slash")
    with pytest.raises(InputError, match="budgets of 3 heads, and a layer has 4"):
        golden.attend(VerticalSlash(heads=MIXED[:3]), x["q"], x["k"], x["k"])
    with pytest.raises(InputError, match="call `for_layer` first"):
        golden.attend(VerticalSlash(file=file), x["q"], x["k"], x["k"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "is no list of layers"),
        ('[{"1": ["stream_llm", 1, 1, 0]}]', "no head '0'"),
        ('[{"0": ["a_shape", 1, 1, 0]}]', "kind='a_shape' must be one of vertical_and_slash"),
        ('[{"0": ["stream_llm", 1, 0, 0]}]', "slash=0 of a stream_llm head"),
        (None, "is no list of layers"),
    ],
)
def test_what_is_no_such_file_raises_input_error(tmp_path, text, reason):
    path = tmp_path / "heads.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=reason):
        module.read_head_budgets(str(path))


@pytest.mark.slow
def test_a_model_searches_a_file_that_it_reads_prompts_with(tmp_path):
    lm, text = sharp_lm(), ids(0, 200)
    config = lm.config
    budgets = head_budgets(lm, text, CANDIDATES, 100)
    assert len(budgets) == config.num_layers and all(len(x) == config.num_heads for x in budgets)
    (tmp_path / "heads.json").write_text(json.dumps(budgets))
    with_file = lm.with_method(pattern=VerticalSlash(file=str(tmp_path / "heads.json")))
    layers = module.read_head_budgets(str(tmp_path / "heads.json"))
    kinds = [LayerKind(pattern=VerticalSlash(heads=heads)) for heads in layers]
    with_layers = sharp_lm(layers=tuple(kinds))
    got, want = (next(x.stream([text])).ids for x in (with_file, with_layers))
    assert got == want
    with pytest.raises(InputError, match="200 tokens, and the first 2500 do not count"):
        head_budgets(lm, text)


def test_the_command_writes_a_file_that_the_pattern_reads(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "heads.json"
    text.write_text("one two three four " * 40)
    words = [f"--text_file={text}", f"--out={out}", "--tokens=150", "--start=100"]
    words += ["--model.preset=tiny"]
    assert config_lib.main(HeadBudgetSearch, search, words) == 0
    layers = module.read_head_budgets(str(out))
    assert len(layers) == preset("tiny").num_layers
    assert "150 tokens; attention kept, mean" in capsys.readouterr().out
    assert config_lib.main(HeadBudgetSearch, search, words[1:]) == 2
    assert "give --text_file=FILE" in capsys.readouterr().err
