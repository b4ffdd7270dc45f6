"""Search by words: bm25s against the published formulas, saved and loaded."""

import json
import math
import sys
from collections import Counter

import numpy as np
import pytest

from lcjax.errors import InputError
from lcjax.retrieval.sparse import METHODS, Sparse, SparseIndex, top_rows

pytest.importorskip("bm25s")

WORDS = [f"w{i:02d}" for i in range(30)]


def corpus(seed, n=40):
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(WORDS) + 1)
    lengths = rng.integers(1, 40, n)
    return [" ".join(rng.choice(WORDS, m, p=weights / weights.sum())) for m in lengths]


def formula(method, texts, query, k1, b, delta):
    """Scores of all texts, from the formulas of Kamphuis et al. 2020, in float64."""
    documents = [Counter(text.split()) for text in texts]
    lengths = [sum(document.values()) for document in documents]
    n, mean = len(texts), sum(lengths) / len(lengths)
    scores = np.zeros(n)
    for term in query.split():
        df = sum(term in document for document in documents)
        if df == 0:
            continue
        for i, document in enumerate(documents):
            tf, norm = document[term], 1 - b + b * lengths[i] / mean
            if method == "lucene":
                part = math.log(1 + (n - df + 0.5) / (df + 0.5)) * tf / (tf + k1 * norm)
            elif method == "robertson":  # bm25s replaces negative idf by 0
                idf = max(0.0, math.log((n - df + 0.5) / (df + 0.5)))
                part = idf * tf / (tf + k1 * norm)
            elif method == "atire":
                part = math.log(n / df) * tf * (k1 + 1) / (tf + k1 * norm)
            elif method == "bm25l":
                c = tf / norm
                part = math.log((n + 1) / (df + 0.5)) * (k1 + 1) * (c + delta) / (k1 + c + delta)
            elif method == "bm25+":
                part = math.log((n + 1) / df) * (tf * (k1 + 1) / (tf + k1 * norm) + delta)
            else:
                part = tf * math.log(n / df)
            scores[i] += part
    return scores


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4), (1.2, 0.0), (2.0, 1.0)])
def test_scores_are_those_of_the_formulas(method, k1, b):
    for seed, delta in enumerate((None, 0.3)):
        texts = corpus(seed)
        index = SparseIndex.build(texts, method=method, k1=k1, b=b, delta=delta)
        usual = 1.0 if method == "bm25+" else 0.5
        for query in ("w00 w03 w03 w20", "w01", "w29 w02 w15 unknown"):
            expected = formula(method, texts, query, k1, b, usual if delta is None else delta)
            scores, has_word = index.scores(query)
            np.testing.assert_allclose(scores, expected, rtol=2e-6, atol=2e-6)
            words = set(query.split())
            assert has_word.tolist() == [bool(words & set(text.split())) for text in texts]


@pytest.mark.parametrize("method", METHODS)
def test_a_search_is_a_sort_of_the_texts_that_have_a_word(method):
    texts = corpus(3)
    index = SparseIndex.build(texts, method=method)
    valid = np.random.default_rng(0).random(len(texts)) < 0.7
    queries = ["w05 w11", "w28", "nothing", ""]
    scores, rows = index.search(queries, 8, valid=valid)
    assert scores.dtype == np.float32 and rows.dtype == np.int64
    for query, query_scores, query_rows in zip(queries, scores, rows):
        all_scores, has_word = index.scores(query)
        order = [i for i in np.lexsort((np.arange(len(texts)), -all_scores)) if has_word[i]]
        expected = [int(i) for i in order if valid[i]][:8]
        assert query_rows.tolist() == expected + [-1] * (8 - len(expected))
        assert np.array_equal(query_scores[: len(expected)], all_scores[expected])
        assert np.isneginf(query_scores[len(expected) :]).all()


def test_equal_scores_are_in_order_of_the_rows():
    scores = np.array([1, 3, 3, 0, 3, 1, 2], np.float32)
    assert top_rows(scores, 3).tolist() == [1, 2, 4]
    assert top_rows(scores, 5).tolist() == [1, 2, 4, 6, 0]
    assert top_rows(scores, 99).tolist() == [1, 2, 4, 6, 0, 5, 3]
    assert top_rows(scores[:0], 3).tolist() == []


def test_a_loaded_index_is_mapped_into_memory_and_finds_the_same(tmp_path):
    texts = corpus(4)
    for method in METHODS:
        index = SparseIndex.build(texts, method=method)
        index.save(tmp_path / method)
        loaded = SparseIndex.load(tmp_path / method)
        assert isinstance(loaded._bm25.scores["data"], np.memmap) and len(loaded) == len(texts)
        for a, b in zip(index.search(texts[:3], 9), loaded.search(texts[:3], 9)):
            assert np.array_equal(a, b)
        assert loaded.settings == Sparse(method=method)


def test_damaged_files_are_one_line(tmp_path):
    SparseIndex.build(corpus(5)).save(tmp_path / "index")
    for name in ("data.csc.index.npy", "indptr.csc.index.npy", "vocab.index.json", "sparse.json"):
        file = tmp_path / "index" / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InputError) as error:
            SparseIndex.load(tmp_path / "index")
        assert "index" in str(error.value) and "\n" not in str(error.value)
        file.unlink()
        with pytest.raises(InputError, match="build the datastore again"):
            SparseIndex.load(tmp_path / "index")
        file.write_bytes(whole)
    SparseIndex.load(tmp_path / "index")


def _other_arrays(array):
    yield from (-array - 1, array[None], np.array(1), array[:0], array[:-1], array + 1000)
    for dtype in (bool, str, complex, np.float64, "M8[s]", [("a", int)]):
        with np.errstate(invalid="ignore"):
            yield array.astype(np.int64).astype(dtype)


def test_files_of_another_content_are_one_line(tmp_path):
    folder = tmp_path / "index"
    SparseIndex.build(["the river stone", "a quiet river", "stone garden"]).save(folder)
    changed = []
    for name in ("data", "indices", "indptr"):
        file = folder / f"{name}.csc.index.npy"
        whole, array = file.read_bytes(), np.load(file)
        for number, other in enumerate(_other_arrays(array)):
            np.save(file, other)
            changed.append((f"{name} {number}", _results(folder)))
        file.write_bytes(whole)
    others = (None, -1, 1.5, "x", [1], {}, 10**30, True)
    for name in ("params.index.json", "vocab.index.json"):
        file = folder / name
        whole = file.read_bytes()
        texts = [[1], {}, None, "x"]
        for key in json.loads(whole):
            texts += [json.loads(whole) | {key: value} for value in others]
        for text in texts:
            file.write_text(json.dumps(text))
            changed.append((f"{name} {text}", _results(folder)))
        file.write_bytes(whole)
    # Finite scores of float type and settings of the building alone pass; checksums find them.
    passed = {name.partition(" ")[0] for name, result in changed if result is not None}
    assert passed <= {"data", "params.index.json"} and _results(folder) is not None
    assert sum(result is None for _, result in changed) > 70


def _results(folder):
    try:
        return SparseIndex.load(folder).search(["river", "garden stone"], 2)
    except InputError as error:
        assert "again" in str(error) and "\n" not in str(error)


def test_stop_words_and_bad_settings(monkeypatch):
    texts = ["the cat and the dog", "a bird in the tree"]
    assert SparseIndex.build(texts).search(["the and"], 2)[1].tolist() == [[-1, -1]]
    index = SparseIndex.build(texts, stopwords=None)
    assert index.search(["the"], 2)[1].tolist() == [[0, 1]]
    for fields, match in [
        ({"method": "bm26"}, "sparse.method='bm26' must be one of lucene"),
        ({"k1": -1}, "sparse.k1=-1 must be"),
        ({"b": 1.5}, "sparse.b=1.5 must be"),
        ({"delta": math.nan}, "sparse.delta=nan must be"),
        ({"stopwords": "klingon"}, "sparse.stopwords=klingon"),
    ]:
        with pytest.raises(InputError, match=match):
            SparseIndex.build(texts, **fields)
    with pytest.raises(InputError, match="no passage has a word"):
        SparseIndex.build(["...", "the"])
    with pytest.raises(InputError, match="k=0 must be a whole number"):
        index.search(["cat"], 0)
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(InputError, match=r"pip install 'bm25s>="):
        SparseIndex.build(texts)


@pytest.mark.parametrize(
    ("text", "query", "other"),
    [
        ("这个港口在早晨很安静。", "港口", "口港"),
        ("港は朝静かです。", "静か", "かさ"),
        ("ﾊﾟﾝとカフェ", "パン", "ンパ"),  # letters of half width
        ("𠮷野家の牛丼", "𠮷野", "野𠮷"),
        ("항구는 아침에 조용하다", "항구", "구항"),  # a particle follows the word
        ("ท่าเรือเงียบในตอนเช้า", "ท่าเรือ", "จรวด"),
        ("ဆိပ်ကမ်းသည် တိတ်ဆိတ်သည်", "ဆိပ်ကမ်း", "ဂျ"),
        ("सुबह बंदरगाह शांत है", "बंदरगाह", "बंदर"),  # spaces, and vowel signs that are no letters
        ("مَرْفَأ هادئ", "مَرْفَأ", "مَر"),
        ("RoPE的位置编码", "位置 rope", "编位"),
        ("a nai\u0308ve ferry", "naïve", "naive"),  # two normal forms
        ("ＡＢＣ", "abc", "bc"),
    ],
)
def test_words_of_every_script_are_found(text, query, other):
    texts = ["A ferry leaves.", text, "灯台 대문 ดาว नमस्ते"]
    index = SparseIndex.build(texts)
    assert index.search([query], 1)[1].tolist() == [[1]]
    assert index.scores(other)[0][1] < index.scores(query)[0][1]  # the order of characters counts


def test_an_index_of_other_terms_is_refused_unless_both_rules_agree(tmp_path):
    for name, text in (("latin", "two cats"), ("chinese", "这个港口")):
        SparseIndex.build([text]).save(tmp_path / name)
        file = tmp_path / name / "sparse.json"
        file.write_text(file.read_text().replace(', "terms": 2', ""))
    assert len(SparseIndex.load(tmp_path / "latin")) == 1
    with pytest.raises(InputError, match="older version, which split other terms.*again"):
        SparseIndex.load(tmp_path / "chinese")


def test_stems_are_numbered_in_the_order_of_the_texts(monkeypatch):
    class Stemmer:
        def __init__(self, language):
            if language != "english":
                raise KeyError(language)

        def stemWord(self, word):
            return word.removesuffix("s")

    module = type(sys)("Stemmer")
    module.Stemmer, module.algorithms = Stemmer, lambda: ["english"]
    monkeypatch.setitem(sys.modules, "Stemmer", module)
    index = SparseIndex.build(["two cats", "one cat", "dogs"], stemmer="english")
    assert list(index._bm25.vocab_dict.items()) == [("two", 0), ("cat", 1), ("one", 2), ("dog", 3)]
    assert index.search(["cats dog"], 3)[1].tolist() == [[2, 0, 1]]
    with pytest.raises(InputError, match="sparse.stemmer=elvish must be one of english"):
        SparseIndex.build(["x"], stemmer="elvish")
    monkeypatch.setitem(sys.modules, "Stemmer", None)
    with pytest.raises(InputError, match="sparse.stemmer=english needs PyStemmer"):
        SparseIndex.build(["x"], stemmer="english")
