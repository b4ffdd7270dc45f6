"""Exact search equals sorting all scores in float64, whatever the blocks and devices are."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax.errors import InputError
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.retrieval import ExactIndex, FaissIndex, RefinedIndex, recall, top_k

static = ("k", "metric", "block_size", "recall_target")
compiled_top_k = jax.jit(top_k, static_argnames=static)


def brute_force(queries, vectors, k, valid=None, metric="dot"):
    """All scores in float64, sorted by score, then by row."""
    queries, vectors = np.asarray(queries, np.float64), np.asarray(vectors, np.float64)
    if metric == "dot":
        scores = queries @ vectors.T
    else:
        scores = -np.square(queries[:, None] - vectors).sum(-1)
    if valid is not None:
        scores[:, ~valid] = -np.inf
    scores = np.pad(scores, ((0, 0), (0, k)), constant_values=-np.inf)
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(scores, rows, 1)
    return scores, np.where(scores == -np.inf, -1, rows)


def integers(seed, num_queries, num_rows, dim, high=3):
    """Small integers, whose products are exact and often equal."""
    generator = np.random.default_rng(seed)
    shapes = (num_queries, dim), (num_rows, dim)
    return [generator.integers(-high, high + 1, shape).astype(np.float32) for shape in shapes]


def normal(seed, num_queries, num_rows, dim, dtype=np.float32):
    generator = np.random.default_rng(seed)
    queries = generator.standard_normal((num_queries, dim), dtype=np.float32)
    return queries, generator.standard_normal((num_rows, dim)).astype(dtype)


def assert_equal(result, expected, exact=True):
    scores, rows = map(np.asarray, result)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(rows, expected[1])
    if exact:
        np.testing.assert_array_equal(scores, expected[0].astype(np.float32))
    else:
        np.testing.assert_allclose(scores, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    num_rows=st.sampled_from([1, 2, 127, 128, 129, 300, 700]),
    k=st.sampled_from([1, 3, 10, 150]),
    block_size=st.sampled_from([1, 128, 200, 384, None]),
    high=st.sampled_from([0, 1, 3]),
    masked=st.booleans(),
    metric=st.sampled_from(["dot", "l2"]),
)
def test_top_k_equals_sorting_all_scores_with_ties(
    seed, num_rows, k, block_size, high, masked, metric
):
    queries, vectors = integers(seed, 3, num_rows, 4, high)
    valid = np.random.default_rng(seed).random(num_rows) < 0.5 if masked else None
    result = top_k(queries, vectors, k, valid=valid, metric=metric, block_size=block_size)
    assert_equal(result, brute_force(queries, vectors, k, valid, metric))


# Quick: every type and every metric.
@pytest.mark.slow_except("dot-float32", "l2-float32", "dot-bfloat16", "l2-float16")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_top_k_of_random_numbers(dtype, metric):
    queries, vectors = normal(0, 5, 3000, 33, dtype)
    expected = brute_force(queries, vectors, 20, metric=metric)
    for block_size in (256, None):
        result = compiled_top_k(queries, vectors, 20, metric=metric, block_size=block_size)
        assert_equal(result, expected, exact=False)


def test_groups_and_whole_blocks_give_the_same():
    queries, vectors = integers(1, 7, 20_000, 5)
    for k in (1, 10, 64, 500):  # groups of 128, 64 and 8 rows; none
        result = compiled_top_k(queries, vectors, k, block_size=4096)
        assert_equal(result, brute_force(queries, vectors, k))


def test_equal_vectors_of_random_numbers_come_in_the_order_of_rows():
    queries, vectors = normal(2, 7, 50, 384)
    vectors = np.tile(vectors, (41, 1))
    for metric in ("dot", "l2"):
        _, rows = compiled_top_k(queries, vectors, 60, metric=metric, block_size=512)
        _, expected = brute_force(queries, vectors, 60, metric=metric)
        np.testing.assert_array_equal(rows, expected)


def test_distances_survive_an_offset_that_vectors_share():
    queries, vectors = normal(3, 6, 2000, 16)
    queries, vectors = queries / 100 + 1000, vectors / 100 + 1000
    expected = brute_force(queries, vectors, 5, metric="l2")
    scores, rows = compiled_top_k(queries, vectors, 5, metric="l2", block_size=256)
    np.testing.assert_array_equal(rows, expected[1])
    np.testing.assert_allclose(scores, expected[0], rtol=1e-5)
    index = ExactIndex(vectors, metric="l2", memory=1)
    scores, rows = index.search(queries, 5)
    np.testing.assert_array_equal(rows, expected[1])
    np.testing.assert_allclose(scores, expected[0], rtol=1e-5)


def test_negative_zero_is_zero():
    vectors = np.array([[-1.0], [1.0], [-1.0], [1.0]], np.float32)
    _, rows = compiled_top_k(np.zeros((2, 1), np.float32), vectors, 4)
    np.testing.assert_array_equal(rows, [[0, 1, 2, 3]] * 2)


def test_top_k_inside_jit_and_vmap():
    queries, vectors = integers(4, 6, 500, 8)
    for metric in ("dot", "l2"):
        expected = brute_force(queries, vectors, 4, metric=metric)

        def one(query, metric=metric):
            scores, rows = top_k(query[None], vectors, 4, metric=metric, block_size=128)
            return scores[0], rows[0]

        assert_equal(jax.jit(jax.vmap(one))(queries), expected)
    valid = np.arange(500) % 3 == 0
    search = jax.jit(lambda queries, valid: top_k(queries, vectors, 4, valid=valid))
    assert_equal(search(queries, valid), brute_force(queries, vectors, 4, valid))


def test_approximate_search_reaches_its_recall():
    queries, vectors = normal(5, 8, 4000, 16)
    _, rows = compiled_top_k(queries, vectors, 10, recall_target=0.9, block_size=1024)
    _, expected = brute_force(queries, vectors, 10)
    num_hits = [len(set(a) & set(b)) for a, b in zip(np.asarray(rows), expected)]
    assert np.mean(num_hits) >= 9


# Quick: fewer rows than devices, and rows that do not divide evenly, one metric each.
@pytest.mark.slow_except("5-l2", "1000-dot")
@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("num_rows", [5, 130, 1000])
def test_eight_devices_and_streams_give_the_same_as_one(metric, num_rows):
    queries, vectors = integers(6, 5, num_rows, 6)
    valid = np.random.default_rng(6).random(num_rows) < 0.8
    expected = brute_force(queries, vectors, 12, valid, metric)
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    for options in ({}, {"memory": 1}, {"mesh": mesh}, {"mesh": mesh, "memory": 1}):
        index = ExactIndex(vectors, valid=valid, metric=metric, **options)
        scores, rows = index.search(queries, 12)
        assert rows.dtype == np.int64
        assert_equal((scores, rows), expected)
        assert_equal(index.search(queries, 12), expected)
    assert_equal(
        ExactIndex(jnp.asarray(vectors), valid=valid, metric=metric, mesh=mesh).search(queries, 12),
        expected,
    )


def test_scores_are_equal_bit_by_bit_on_all_devices():
    queries, vectors = normal(7, 9, 9000, 48)
    mesh = make_mesh(Mesh())
    results = [
        ExactIndex(vectors, **options).search(queries, 10)
        for options in ({}, {"memory": 1}, {"mesh": mesh}, {"mesh": mesh, "memory": 1})
    ]
    assert_equal(results[0], brute_force(queries, vectors, 10), exact=False)
    for result in results[1:]:
        assert_equal(result, results[0])


def test_many_queries_are_searched_in_batches():
    queries, vectors = integers(8, 1100, 40, 6)
    index = ExactIndex(vectors, memory=1)
    assert_equal(index.search(queries, 3), brute_force(queries, vectors, 3))
    assert index.search(queries[:0], 3)[1].shape == (0, 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_memory_map_in_bounded_memory(tmp_path, dtype):
    queries, vectors = integers(9, 4, 5000, 6)
    np.save(tmp_path / "vectors.npy", vectors.astype(dtype))
    vectors = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    expected = brute_force(queries, vectors, 7)
    sizes = []
    index = ExactIndex(vectors, memory=1)
    part = index._part
    index._part = lambda *args: sizes.append(part(*args)[0].shape[0]) or part(*args)
    assert_equal(index.search(queries, 7), expected)
    assert max(sizes) <= 8192 and len(index) == 5000
    # Advice to the system is for whole pages, and rows of a view begin anywhere.
    view = ExactIndex(vectors[13:4000], memory=1)
    assert_equal(view.search(queries, 7), brute_force(queries, vectors[13:4000], 7))


def test_a_written_memory_map_keeps_its_changes(tmp_path):
    queries, vectors = integers(19, 4, 5000, 6)
    np.save(tmp_path / "vectors.npy", np.zeros_like(vectors))
    copied = np.load(tmp_path / "vectors.npy", mmap_mode="c")
    copied[:] = vectors
    copied.flags.writeable = False
    for view in (copied, np.asarray(copied)):
        assert_equal(
            ExactIndex(view, memory=1).search(queries, 7), brute_force(queries, vectors, 7)
        )


def test_the_pages_of_a_map_are_released(tmp_path):
    def resident():  # bytes of pages of files in this process
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssFile:")[1].split()[0])

    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux")
    queries, vectors = normal(20, 2, 40_000, 256)  # 41 MB
    np.save(tmp_path / "vectors.npy", vectors)
    vectors = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    index = ExactIndex(vectors, memory=1 << 24)
    index.search(queries, 3)
    before = resident()
    index.search(queries, 3)
    assert resident() - before < 1 << 20
    assert float(vectors.sum()) and resident() - before > 1 << 25  # else nothing was measured
    index.search(queries, 3)
    assert resident() - before < 1 << 20


def test_vectors_larger_than_the_memory_are_streamed(monkeypatch):
    monkeypatch.setattr("lcjax.retrieval.search._CPU_BLOCK_BYTES", 1)
    queries, vectors = integers(10, 3, 5500, 6)
    index = ExactIndex(vectors, memory=50_000)  # blocks of 1,024 rows of 24 bytes
    assert index._part_rows(1024) == 1024
    assert_equal(index.search(queries, 7), brute_force(queries, vectors, 7))
    assert index._resident is None


@pytest.mark.parametrize(("metric", "bad"), [("dot", np.nan), ("dot", -np.nan), ("l2", np.inf)])
def test_numbers_that_are_not_finite_raise_input_error_with_the_row(metric, bad):
    queries, vectors = normal(11, 3, 500, 5)
    vectors[321, 2] = bad
    queries[:, 2] = 1.0
    for memory in (1, 1 << 30):
        with pytest.raises(InputError, match="vectors: row 321 has no finite score"):
            ExactIndex(vectors, metric=metric, memory=memory).search(queries, 2)
    valid = np.arange(500) != 321
    clean = np.where(np.isfinite(vectors), vectors, 0)
    result = ExactIndex(vectors, valid=valid, metric=metric).search(queries, 2)
    assert_equal(result, brute_force(queries, clean, 2, valid, metric), exact=False)
    queries[1, 0] = bad
    with pytest.raises(InputError, match="queries: query 1 holds NaN"):
        ExactIndex(clean, metric=metric).search(queries, 2)


def test_bad_arguments_raise_input_error():
    queries, vectors = normal(12, 2, 10, 4)
    index = ExactIndex(vectors)
    for k in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="^k="):
            index.search(queries, k)
        with pytest.raises(InputError, match="^k="):
            top_k(queries, vectors, k)
    for wrong, words in (
        (queries[:, :3], "queries: dimension 3, but the vectors have 4"),
        (queries[0], "queries: shape"),
        (queries.astype(int), "queries: type int64"),
    ):
        with pytest.raises(InputError, match=words):
            index.search(wrong, 1)
        with pytest.raises(InputError, match=words):
            top_k(wrong, vectors, 1)
    for wrong, words in (
        (vectors[:0], "vectors: shape .* has no numbers"),
        (vectors[:, 0], "vectors: shape"),
        (vectors.astype(np.int32), "vectors: type int32"),
        (vectors.astype(np.float64), "vectors: type float64"),
        ([[1.0]], "vectors: shape list"),
    ):
        with pytest.raises(InputError, match=words):
            ExactIndex(wrong)
        with pytest.raises(InputError, match=words):
            top_k(queries, wrong, 1)
    for options, words in (
        ({"valid": np.ones(9, bool)}, "^valid:"),
        ({"valid": np.ones(10, int)}, "^valid:"),
        ({"metric": "cosine"}, "^metric="),
        ({"recall_target": 0.0}, "^recall_target="),
    ):
        with pytest.raises(InputError, match=words):
            ExactIndex(vectors, **options)
        with pytest.raises(InputError, match=words):
            top_k(queries, vectors, 1, **options)
    with pytest.raises(InputError, match="^memory="):
        ExactIndex(vectors, memory=0)
    with pytest.raises(InputError, match="^block_size="):
        top_k(queries, vectors, 1, block_size=0)


# FAISS
# -----


def clustered(seed, num_queries, num_rows, dim, clusters=50):
    """Unit vectors around random centres."""
    generator = np.random.default_rng(seed)
    centers = generator.standard_normal((clusters, dim))
    points = centers[generator.integers(0, clusters, num_rows + num_queries)]
    points = points + 0.5 * generator.standard_normal(points.shape)
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    return points[:num_queries], points[num_queries:]


def test_faiss_flat_equals_exact():
    faiss = pytest.importorskip("faiss")
    queries, vectors = normal(13, 20, 2000, 24)
    flat = faiss.IndexFlatIP(24)
    flat.add(vectors)
    scores, rows = flat.search(queries, 10)
    assert_equal(ExactIndex(vectors).search(queries, 10), (scores, rows), exact=False)


@pytest.mark.slow_except("clustered")
@pytest.mark.parametrize("make", [clustered, normal])
def test_ivf_as_shipped_reaches_a_recall_of_95_percent(make):
    pytest.importorskip("faiss")
    queries, vectors = make(14, 200, 20_000, 32)
    index = FaissIndex.build(vectors)
    assert recall(index, ExactIndex(vectors), queries, 10) >= 0.95
    assert index.tuned_recall >= 0.97
    if make is clustered:
        assert index.width < 40  # of 128 lists


@pytest.mark.slow_except("ivf_pq", "hnsw")
@pytest.mark.parametrize("kind", ["ivf", "ivf_pq", "hnsw"])
def test_save_load_and_add_give_the_same_rows(kind, tmp_path):
    faiss = pytest.importorskip("faiss")
    faiss.omp_set_num_threads(1)  # threads build the graph of hnsw in any order
    queries, vectors = clustered(15, 30, 3000, 32)
    index = FaissIndex.build(vectors[:2500], kind=kind)
    again = FaissIndex.build(vectors[:2500], kind=kind)
    result = index.search(queries, 10)
    assert_equal(again.search(queries, 10), result)
    index.save(tmp_path / "index.faiss")
    loaded = FaissIndex.load(tmp_path / "index.faiss", dim=32, count=2500)
    assert (loaded.kind, loaded.dim, len(loaded), loaded.width) == (kind, 32, 2500, index.width)
    assert_equal(loaded.search(queries, 10), result)
    for one in (index, loaded):
        one.add(vectors[2500:])
        assert len(one) == 3000
    result = index.search(vectors[2500:2510], 10)
    assert_equal(loaded.search(vectors[2500:2510], 10), result)
    assert recall(index, ExactIndex(vectors), queries, 10) >= (0.5 if kind == "ivf_pq" else 0.9)
    assert (result[1] >= 2500).any()


@pytest.mark.slow_except("ivf-dot", "ivf_pq-l2", "hnsw-dot", "hnsw-l2")  # "ivf_pq" is an "ivf"
@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("kind", ["ivf", "ivf_pq", "hnsw"])
def test_candidates_of_an_index_are_scored_exactly(kind, metric):
    pytest.importorskip("faiss")
    queries, vectors = normal(19, 20, 3000, 32)
    vectors[7] = 3 * queries[0]  # inner products and distances have other neighbours
    index = FaissIndex.build(vectors, kind=kind, metric=metric)
    assert index.metric == metric
    exact = ExactIndex(vectors, metric=metric).search(queries, 10)
    everything = RefinedIndex(index, vectors, 300)
    index._set_width(3000)
    assert_equal(everything.search(queries, 10), exact, exact=False)
    scores, rows = RefinedIndex(index, vectors, 2).search(queries, 10)
    difference = vectors[rows] - queries[:, None]
    expected = -np.square(difference).sum(-1) if metric == "l2" else None
    expected = np.einsum("qkd,qd->qk", vectors[rows], queries) if expected is None else expected
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
    assert (np.diff(scores) <= 0).all()


@pytest.mark.slow
def test_refined_codes_reach_the_recall_that_their_width_was_chosen_for():
    pytest.importorskip("faiss")
    queries, vectors = clustered(20, 200, 20_000, 32)
    index, exact = FaissIndex.build(vectors, kind="ivf_pq"), ExactIndex(vectors)
    refined = RefinedIndex(index, vectors)
    assert recall(index, exact, queries, 10) < 0.9
    assert recall(refined, exact, queries, 10) >= 0.95
    assert index.width < 40  # of 128 lists
    few, some = RefinedIndex(index, vectors[:], 1).search(queries[:2], 20_001)
    assert few.shape == (2, 20_001) and (some[:, -1] == -1).all() and np.isneginf(few[:, -1]).all()
    with pytest.raises(InputError, match="vectors: 5 rows, but the index has 20000"):
        RefinedIndex(index, vectors[:5])
    with pytest.raises(InputError, match="refine_factor=0 must be"):
        RefinedIndex(index, vectors, 0)


def test_faiss_index_smaller_than_k():
    pytest.importorskip("faiss")
    queries, vectors = integers(16, 3, 5, 8)
    for kind in ("ivf", "hnsw", "ivf_pq"):
        scores, rows = FaissIndex.build(vectors, kind=kind).search(queries, 7)
        assert (rows[:, 5:] == -1).all() and (scores[:, 5:] == -np.inf).all()
        assert (np.sort(rows[:, :5]) == np.arange(5)).all()


def test_faiss_training_rows_are_bounded_and_seeded(monkeypatch):
    pytest.importorskip("faiss")
    queries, vectors = clustered(17, 10, 2000, 16)
    sizes = []
    from lcjax.retrieval import faiss_index

    finite_rows = faiss_index.finite_rows
    monkeypatch.setattr(
        faiss_index,
        "finite_rows",
        lambda *args: sizes.append(len(finite_rows(*args))) or finite_rows(*args),
    )
    one = FaissIndex.build(vectors, nlist=8, nprobe=1, train_size=500, seed=1)
    assert sizes[0] == 500
    two = FaissIndex.build(vectors, nlist=8, nprobe=1, train_size=500, seed=1)
    assert_equal(one.search(queries, 5), two.search(queries, 5))


@pytest.mark.slow
def test_faiss_bad_input_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("faiss")
    queries, vectors = normal(18, 2, 300, 8)
    for options, words in (
        ({"kind": "flat"}, "^kind="),
        ({"metric": "cosine"}, "^metric="),
        ({"nlist": 0}, "^nlist="),
        ({"nlist": 301}, "^nlist="),
        ({"kind": "ivf_pq", "m": 3}, "^m=3"),
        ({"kind": "ivf_pq", "vectors": vectors[:1]}, "^kind=ivf_pq .* use kind=ivf"),
        ({"seed": -1}, "^seed="),
    ):
        with pytest.raises(InputError, match=words):
            FaissIndex.build(**{"vectors": vectors} | options)
    index = FaissIndex.build(vectors)
    with pytest.raises(InputError, match="vectors: dimension 7"):
        index.add(vectors[:, :7])
    with pytest.raises(InputError, match="queries: dimension 7"):
        index.search(queries[:, :7], 1)
    with pytest.raises(InputError, match="^k=0"):
        index.search(queries, 0)
    wrong = vectors.copy()
    wrong[7, 1] = np.nan
    with pytest.raises(InputError, match="vectors: row 7"):
        FaissIndex.build(wrong, train_size=10)
    file = tmp_path / "index.faiss"
    index.save(file)
    with pytest.raises(InputError, match="dim=8, but 9 is needed"):
        FaissIndex.load(file, dim=9)
    with pytest.raises(InputError, match="count=300, but 5 is needed"):
        FaissIndex.load(file, count=5)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="damaged"):
        FaissIndex.load(file)
    with pytest.raises(InputError, match="nothing|not an index"):
        FaissIndex.load(tmp_path / "nothing")
    with pytest.raises(InputError, match="queries: recall"):
        recall(index, index, queries[:0], 1)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"pip install 'bm25s>="):
        FaissIndex.build(vectors)
