"""Retrievers: sparse, dense, fused and ranked again; the sanity test; the command."""

import json
import re
import sys

import numpy as np
import pytest
from argument_types import check_other_types
from retrieval_support import WordEncoder, content, write_corpus

from lcjax.data import TextConfig
from lcjax.errors import InputError
from lcjax.retrieval import (
    BertEncoder,
    BuildConfig,
    Chunking,
    CrossEncoder,
    Datastore,
    Document,
    ExactIndex,
    LateInteraction,
    Passage,
    Retriever,
    SparseIndex,
    StaticEncoder,
    build,
    check,
    datastore,
    open_encoder,
    recall,
    top_k,
)
from lcjax.retrieval import __main__ as command
from lcjax.retrieval.retriever import _search_valid, fuse_ranks

pytest.importorskip("bm25s")


@pytest.fixture
def encoder():
    return WordEncoder(dim=32)


@pytest.fixture
def store(tmp_path, encoder):
    text = write_corpus(tmp_path / "text", files=2)
    chunking = Chunking("sentences", 22, title_field="title")
    out = str(tmp_path / "store")
    build(BuildConfig(TextConfig(path=text), chunking, out=out, workers=1), encoder=encoder)
    return Datastore(out)


def rows_of(store, hits):
    rows = {p.id: row for row, p in enumerate(store.passages(range(store.num_rows)))}
    return [[rows[hit.passage.id] for hit in line] for line in hits]


QUERIES = ["quiet harbour letter", "Item33", "silver horse market bridge", "unknowable"]


def test_sparse_hits_are_those_of_the_index_of_words(store):
    hits = Retriever.open(store, "sparse").search(QUERIES, 5)
    scores, rows = store.sparse().search(QUERIES, 5)
    assert rows_of(store, hits) == [[r for r in line.tolist() if r >= 0] for line in rows]
    assert [hit.score for hit in hits[0]] == scores[0].tolist()
    assert "Item33" in hits[1][0].passage.text and hits[3] == []
    assert Retriever.open(store.folder, "sparse").search(QUERIES, 5) == hits
    assert Retriever.open(store, "sparse").search([], 5) == []


def test_dense_hits_are_the_largest_products(store, encoder):
    hits = Retriever.open(store, "dense", encoder=encoder).search(QUERIES, 5)
    products = encoder.encode_queries(QUERIES).astype(np.float64) @ store.vectors().T
    assert rows_of(store, hits) == np.argsort(-products, 1, kind="stable")[:, :5].tolist()
    np.testing.assert_allclose([hit.score for hit in hits[0]], np.sort(products[0])[::-1][:5], 1e-5)


def test_fused_ranks_are_sums_of_reciprocals(store, encoder):
    assert fuse_ranks([np.array([4, 7, -1]), np.array([7, 2, 4])], 60.0) == [
        (7, 1 / 62 + 1 / 61),
        (4, 1 / 61 + 1 / 63),
        (2, 1 / 62),
    ]
    assert fuse_ranks([np.array([5, 1]), np.array([1, 5])], 0.0) == [(1, 1.5), (5, 1.5)]
    n = store.num_rows
    hits = Retriever.open(store, encoder=encoder, k_candidates=n).search(QUERIES, 7)
    sparse = Retriever.open(store, "sparse").search(QUERIES, n)
    dense = Retriever.open(store, "dense", encoder=encoder).search(QUERIES, n)
    for query_hits, *lists in zip(hits, rows_of(store, sparse), rows_of(store, dense)):
        expected = fuse_ranks([np.array(rows, int) for rows in lists], 60.0)[:7]
        assert [
            (row, hit.score) for row, hit in zip(*rows_of(store, [query_hits]), query_hits)
        ] == (expected)
    few = Retriever.open(store, encoder=encoder, k_candidates=3, rank_constant=1.0)
    assert len(few.search(QUERIES[:1], 2)[0]) == 2


class Lengths:
    """Prefers short passages."""

    queries = ()

    def score(self, query, passages):
        self.queries += (query,)
        return np.array([-len(passage) for passage in passages])


def test_the_best_candidates_are_ranked_again(store):
    rerank = Lengths()
    retriever = Retriever.open(store, "sparse", rerank=rerank, k_candidates=6)
    hits = retriever.search(QUERIES, 3)
    first = Retriever.open(store, "sparse").search(QUERIES, 6)
    for query_hits, candidates in zip(hits, first):
        lengths = sorted(len(hit.passage.full_text) for hit in candidates)[:3]
        assert [len(hit.passage.full_text) for hit in query_hits] == lengths
        assert [hit.score for hit in query_hits] == [-length for length in lengths]
    assert rerank.queries == tuple(QUERIES[:3])  # the last one has no candidate
    # where more hits are asked for than candidates, all of them are ranked again
    assert len(retriever.search(QUERIES[:1], 9)[0]) == 9
    rerank.score = lambda query, passages: np.zeros(2)
    with pytest.raises(InputError, match=r"rerank.score returned \[2\], not 6 finite numbers"):
        retriever.search(QUERIES[:1], 3)


@pytest.mark.parametrize("kind", ["sparse", "dense", "hybrid"])
def test_changes_of_the_datastore_change_no_other_hit(kind, store, encoder):
    def search(k=8):
        opened = Retriever.open(store.folder, kind, encoder=encoder)
        return [[hit.passage.id for hit in hits] for hits in opened.search(QUERIES[:3], k)]

    before = search(30)
    store.append([Document("other", "Nothing to see but a zebra here")], encoder=encoder)
    appended = Retriever.open(store, kind, encoder=encoder)
    assert appended.search(["Nothing to see but a zebra here"], 1)[0][0].passage.document == "other"
    if kind == "dense":
        assert [[i for i in line if "other" not in i][:20] for line in search(30)] == [
            line[:20] for line in before
        ]
    first = [line[0] for line in search()]
    store.delete(first)
    after = search()
    assert not {i for line in after for i in line} & set(first)
    if kind == "dense":
        assert all(len(line) == 8 for line in after)


@pytest.mark.parametrize("kind", ["hnsw", "ivf_pq"])
def test_a_faiss_index_is_stored_with_the_vectors(kind, store, encoder, capsys):
    pytest.importorskip("faiss")
    with pytest.raises(InputError, match=f"has no index {kind}, but none: build it with"):
        Retriever.open(store, "dense", encoder=encoder, index=kind)
    store.build_faiss(kind)
    assert re.search(rf"index {kind}: .*, recall@10 [01]\.\d+ on rows", capsys.readouterr().out)

    def hits(index):
        opened = Retriever.open(store.folder, "dense", encoder=encoder, index=index)
        lines = opened.search(QUERIES[:3], 3)
        ids = [[hit.passage.id for hit in line] for line in lines]
        return ids, np.array([[hit.score for hit in line] for line in lines])

    def assert_hits_are_exact():
        (ids, scores), (expected_ids, expected_scores) = hits(kind), hits("exact")
        assert ids == expected_ids
        np.testing.assert_allclose(scores, expected_scores, rtol=1e-5)

    assert_hits_are_exact()
    store.append([Document("other", "Nothing to see but a zebra here")], encoder=encoder)
    store.delete([hits("exact")[0][0][0]])
    assert_hits_are_exact()
    assert store.check_files() and len(list(store.folder.glob("*.faiss"))) == 1


def test_an_index_without_deletions_is_searched_for_more_hits():
    class Index:
        def search(self, queries, k):
            self.k = k
            rows = np.tile(np.arange(k), (len(queries), 1))
            return -rows.astype(np.float32), np.where(rows < 50, rows, -1)

    index, valid = Index(), np.arange(100) % 10 == 9
    scores, rows = _search_valid(index, np.zeros((2, 3)), 4, valid)
    assert rows.tolist() == [[9, 19, 29, 39]] * 2 and index.k == 64
    assert scores.tolist() == [[-9, -19, -29, -39]] * 2
    scores, rows = _search_valid(index, np.zeros((1, 3)), 6, valid)  # fewer than six exist
    assert rows.tolist() == [[9, 19, 29, 39, 49, -1]] and np.isneginf(scores[0, 5])


def test_bad_arguments_are_one_line(store, encoder):
    with pytest.raises(InputError, match="was built by the encoder words"):
        Retriever.open(store, "dense", encoder=WordEncoder(seed=2))
    for fields, match in [
        ({"kind": "fuzzy"}, "kind='fuzzy' must be one of sparse, dense, hybrid"),
        ({"index": "flat"}, "index='flat' must be one of exact, ivf"),
        ({"kind": "sparse", "k_candidates": 0}, "k_candidates=0 must be"),
        ({"kind": "sparse", "rank_constant": -1}, "rank_constant=-1 must be"),
    ]:
        with pytest.raises(InputError, match=match):
            Retriever.open(store, **fields)
    retriever = Retriever.open(store, "sparse")
    for queries, k, match in [
        ("question", 3, "queries must be a list of texts"),
        (object(), 3, "queries must be a list of texts"),
        ([3], 3, r"queries\[0\]=3 must be a text"),
        (["a"], 0, "k=0 must be a whole number"),
    ]:
        with pytest.raises(InputError, match=match):
            retriever.search(queries, k)
    with pytest.raises(InputError, match="encoder=7 is no encoder; open one"):
        Retriever.open(store, "dense", encoder=7)
    with pytest.raises(InputError, match="encoder='model' is no encoder"):
        store.encode("model")
    with pytest.raises(InputError, match="rerank=words cannot score"):
        Retriever.open(store, "sparse", rerank=encoder)
    with pytest.raises(InputError, match="must be a Document"):
        store.append(["text"], encoder=encoder)
    with pytest.raises(InputError, match="text=3 must be a string"):
        Document("name", 3)
    with pytest.raises(InputError, match="n=0 must be"):
        check(retriever, 0)
    store.index["encoders"] = {}
    for fields in ({"index": "ivf"}, {"encoder": "model"}, {"encoder": encoder}):
        with pytest.raises(InputError, match="has no vectors: build it with an encoder"):
            Retriever.open(store, **fields)


def test_sentences_of_the_passages_are_found_and_a_broken_index_is_noticed(store):
    retriever = Retriever.open(store, "sparse")
    result = check(retriever, 20, seed=1)
    assert result.num_sentences == 20 and result.passed
    assert result.rates["verbatim"] == {"hit@1": 1.0, "hit@10": 1.0, "MRR": 1.0}
    assert result.rates["dropped words"]["hit@10"] > 0.9
    assert result.rates["swapped words"] == result.rates["verbatim"]  # words have no order
    assert check(retriever, 20, seed=1) == result
    assert "| verbatim | 1.000 | 1.000 | 1.000 |" in result.table()
    # passages of other rows
    retriever.store.passages = lambda rows: [
        Passage(p.id, "Six words that nobody wrote here.", "", "")
        for p in Datastore.passages(store, rows)
    ]
    with pytest.warns(UserWarning, match="found too rarely .*'hit@1': 0.0,.*check the chunking"):
        samples = check(retriever, 20)
    assert not samples.passed


def test_sentences_without_spaces_are_found(tmp_path):
    texts = ["这个港口在早晨很安静。灯塔在北边的岩石上。", "渡轮七点离开码头，晚上九点回来。"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    config = BuildConfig(TextConfig(path=str(tmp_path / "a.jsonl")), out=str(tmp_path / "o"))
    build(config)
    result = check(Retriever.open(tmp_path / "o"), 2)
    assert [rate["hit@1"] for rate in result.rates.values()] == [1.0, 1.0, 1.0]


def test_text_without_sentences_cannot_be_tested(tmp_path):
    (tmp_path / "a.txt").write_text("one two")
    build(BuildConfig(TextConfig(path=str(tmp_path / "a.txt")), out=str(tmp_path / "o"), workers=1))
    with pytest.raises(InputError, match="no passage has a sentence of 6 to 40 words"):
        check(Retriever.open(tmp_path / "o"))


# The command


def run(capsys, *words):
    code = command.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_builds_searches_checks_appends_and_deletes(tmp_path, capsys):
    text, out = write_corpus(tmp_path / "text", files=2), tmp_path / "out"
    config = tmp_path / "config.yaml"
    config.write_text(
        f"data: {{path: {text}}}\nchunking: {{unit: sentences, size: 22, title_field: title}}\n"
    )
    build_words = ("build", "--config", config, f"--out={out}", "--workers=1")
    code, printed, _ = run(capsys, *build_words, "--part=0/2")
    assert code == 0
    assert "part 0/2 is written; when all are, run the command without --part" in printed
    run(capsys, *build_words, "--part", "1/2")
    code, printed, _ = run(capsys, *build_words)
    assert code == 0 and "60 passages of 20 documents" in printed
    before = content(out)
    assert run(capsys, *build_words)[0] == 0 and content(out) == before
    code, printed, _ = run(capsys, "search", out, "Item33 letter", "unknowable", "--k", 2)
    assert code == 0 and "Item33" in printed and "no passage has a word" in printed
    assert "  1  " in printed and "  2  " in printed and "  3  " not in printed
    code, printed, _ = run(capsys, "search", out, "Item33", "--json")
    (hit,) = map(json.loads, printed.splitlines())
    assert hit["rank"] == 1 and "Item33" in hit["text"] and hit["title"].startswith("Title")
    code, printed, _ = run(capsys, "check", out, "--n", 5, "--files")
    assert code == 0 and "checksums are right" in printed and "| 5 sentences | hit@1" in printed
    (tmp_path / "new.jsonl").write_text('{"text": "A zebra.", "title": "Z"}\n')
    code, printed, _ = run(capsys, "append", out, "--path", tmp_path / "new.jsonl")
    assert code == 0 and "1 passages more, 61 in all" in printed
    code, printed, _ = run(capsys, "delete", out, hit["id"])
    assert code == 0 and "1 deleted, 60 passages remain" in printed
    code, printed, _ = run(capsys, "search", out, "Item33", "zebra")
    assert "no passage has" in printed and "new.jsonl:1#0-8" in printed


def test_hard_negatives_are_the_best_passages_without_the_answer(store, tmp_path, capsys):
    texts = [passage.text for passage in store.passages(range(4))]
    asked = [text.split()[1:6] for text in texts]
    rows = [
        {"question": " ".join(words), "answer": text.split()[0]}
        for words, text in zip(asked, texts)
    ]
    lines = [*map(json.dumps, rows), '{"question": "quiet harbour", "answers": ["nowhere"]}', ""]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    words = ["negatives", "--path", tmp_path / "questions.jsonl", "--store", store.folder]
    words += ["--k", 30, "--count", 3, "--kind", "sparse", "--out"]
    out = tmp_path / "pairs.jsonl"
    code, shown, _ = run(capsys, *words, out)
    assert code == 0 and "4 pairs; left out: 1 questions whose answer no passage has, 0" in shown
    searched = Retriever.open(store, "sparse").search([row["question"] for row in rows], 30)
    for line, row, hits in zip(out.read_text().splitlines(), rows, searched, strict=True):
        record, ranked = json.loads(line), [hit.passage for hit in hits]
        has_answer = [row["answer"] in passage.text.split() for passage in ranked]
        assert record["query"] == row["question"]
        assert record["positive"]["text"] == ranked[has_answer.index(True)].text
        assert record["positive"]["title"].startswith("Title")
        without = [p.text for p, has in zip(ranked, has_answer) if not has]
        assert [passage["text"] for passage in record["negatives"]] == without[:3]
    for change, message in (
        ([out], "exists and is not replaced"),
        ([tmp_path / "b.jsonl", "--count", 31], "0 pairs; left out: 1 questions"),
        ([tmp_path / "b.jsonl", "--path", tmp_path / "no"], "is no file; name lines of"),
        ([tmp_path / "b.jsonl", "--path", out], "pairs.jsonl:1 has no question"),
    ):
        code, _, error = run(capsys, *words, *change)
        assert code == 2 and message in error and error.count("\n") == 1
        assert not (tmp_path / "b.jsonl").exists()


def test_questions_may_hold_any_separator_of_unicode_and_must_be_utf8(store, tmp_path, capsys):
    text = store.passages([0])[0].text
    row = {"question": f"{text}\u2028\x85", "answer": text.split()[0], "note": "\u2029"}
    file, out = tmp_path / "questions.jsonl", tmp_path / "pairs.jsonl"
    words = ["negatives", "--path", file, "--store", store.folder, "--kind", "sparse"]
    words += ["--k", 5, "--count", 1, "--out", out]
    file.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8-sig")
    code, shown, _ = run(capsys, *words)
    assert code == 0 and "1 pairs; left out: 0" in shown
    out.unlink()
    file.write_bytes(b'{"question": "caf\xe9", "answer": "a"}')
    code, _, error = run(capsys, *words)
    assert code == 2 and "is not UTF-8" in error and error.count("\n") == 1


def test_mistakes_on_the_command_line_are_one_line(tmp_path, capsys, monkeypatch):
    text, out = write_corpus(tmp_path / "text", files=1, lines=2), tmp_path / "out"
    build(BuildConfig(TextConfig(path=text), out=str(out), workers=1))
    capsys.readouterr()
    for words, match in [
        ((), f"error: no command; known: {', '.join(sorted(command._COMMANDS))}"),
        (("bild",), "error: bild is not a command; did you mean build?"),
        (("build",), "error: out is empty: give --out=FOLDER"),
        (("build", f"--out={out}x"), "error: data.path is empty"),
        (("build", f"--out={out}x", f"--data.path={text}", "--part=2/2"), "part=2/2 must be i/n"),
        (("build", "--part"), "--part has no value"),
        (
            ("build-tokens", "--part=0/2"),
            "--part=0/2: build-tokens appends the keys of all tokens to one file in the order of"
            " the text, so it has no parts: run it once, on several devices",
        ),
        (("build", f"--out={out}", "--chunking.size=x"), "chunking.size"),
        (("search", tmp_path, "x"), "holds no datastore: give a folder"),
        (("search", out), "the following arguments are required: question"),
        (("search", out, "x", "--k=many"), "--k: many must be a whole number"),
        (("search", out, "x", "--k=0"), "k=0 must be"),
        (("search", out, "x", "--kind=dense"), "has no vectors: build it with an encoder"),
        (("search", out, "x", "--index=flat"), "index='flat' must be one of"),
        (("check", out, "--n=0"), "n=0 must be"),
        (("append", out), "required: --path"),
        (("append", out, "--path=nothing.txt"), "data.path=nothing.txt does not exist"),
        (("delete", out, "nothing"), "has no passage nothing"),
        (("delete", out), "required: id"),
    ]:
        code, _, error = run(capsys, *words)
        assert code == 2 and match in error and error.count("\n") == 1, (words, error)
    assert run(capsys, "--help")[0] == 0
    for name in command._COMMANDS:
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
    assert "--chunking.size" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "bm25s", None)
    code, _, error = run(capsys, "search", out, "x")
    assert code == 2 and "pip install 'bm25s>=" in error


def test_false_in_the_section_of_an_encoder_reaches_it(monkeypatch):
    options = {}
    monkeypatch.setattr(
        datastore, "open_encoder", lambda path, **o: options.update(o) or WordEncoder()
    )
    datastore.EncoderSection("abc", normalize=False, query_prefix="").open()
    assert options == {"normalize": False, "query_prefix": ""}


def test_an_encoder_is_opened_by_the_section_that_built_the_vectors(tmp_path, monkeypatch, capsys):
    opened = []

    def open_section(section, mesh=None):
        if not section.path:
            return None
        opened.append(section)
        return WordEncoder(seed=len(section.path))

    monkeypatch.setattr(datastore.EncoderSection, "open", open_section)
    text, out = write_corpus(tmp_path / "text", files=1), tmp_path / "out"
    words = ("build", f"--data.path={text}", f"--out={out}", "--encoder.path=abc")
    assert run(capsys, *words, "--encoder.pooling=mean")[0] == 0
    code, printed, _ = run(capsys, "search", out, "Item3 letter", "--kind=dense", "--k=1")
    assert code == 0 and "  1  " in printed
    assert opened[-1] == datastore.EncoderSection("abc", pooling="mean")
    # An encoder that has moved is opened with the settings that made the vectors.
    assert run(capsys, "search", out, "Item3", "--kind=dense", "--encoder=xyz")[0] == 0
    assert opened[-1] == datastore.EncoderSection("xyz", pooling="mean")
    (tmp_path / "new.jsonl").write_text('{"text": "A zebra.", "title": ""}\n')
    append = ("append", out, "--path", tmp_path / "new.jsonl")
    code, printed, _ = run(capsys, *append, "--encoder=xyz")
    assert code == 0 and "1 passages more" in printed
    assert opened[-1] == datastore.EncoderSection("xyz", pooling="mean")
    store = Datastore(out)
    expected = WordEncoder(seed=3).encode_passages(["A zebra."])
    np.testing.assert_array_equal(store.vectors()[-1:], expected)
    assert store.append([Document("a", "Another zebra")], encoder="uvw") == 1
    with pytest.raises(InputError, match="is another: search with the same"):
        store.append([Document("b", "A third zebra")], encoder="of another seed")
    assert len(store) == len(Datastore(out)) == store.num_rows

    def cannot_open(section, mesh=None):
        raise InputError("abc: no such folder")

    with monkeypatch.context() as patch:
        patch.setattr(datastore.EncoderSection, "open", cannot_open)
        code, _, error = run(capsys, "search", out, "x", "--kind=dense")
    assert code == 2 and "(abc: no such folder); if it has moved, name its path" in error
    with monkeypatch.context() as patch:
        patch.setattr(datastore.EncoderSection, "open", cannot_open)
        code, _, error = run(capsys, *append)
    assert code == 2 and "name its path: --encoder=PATH of a command" in error
    code, _, error = run(capsys, "search", out, "x", "--kind=dense", "--encoder=abcd")
    assert code == 2 and "is another: search with the same" in error
    monkeypatch.setattr(
        datastore.EncoderSection, "open", lambda section, mesh=None: WordEncoder(seed=9)
    )
    code, _, error = run(capsys, "search", out, "x", "--kind=hybrid")
    assert code == 2 and "encoder=abc is not the one that built" in error


def test_arguments_of_other_types_are_input_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vectors = np.eye(4, dtype=np.float32)
    exact, words = ExactIndex(vectors), SparseIndex.build(["the river stone", "a quiet garden"])
    check_other_types(ExactIndex, vectors=vectors)
    check_other_types(exact.search, queries=vectors, k=2)
    check_other_types(recall, index=exact, exact=exact, queries=vectors, k=2)
    check_other_types(top_k, "queries", "valid", "k", queries=vectors, vectors=vectors, k=2)
    check_other_types(SparseIndex.build, "texts")
    check_other_types(words.scores)
    check_other_types(words.search, queries=["river"], k=1)
    check_other_types(words.save, "folder")
    check_other_types(open_encoder, "path_or_name")
    for kind in (BertEncoder, CrossEncoder, LateInteraction, StaticEncoder, SparseIndex):
        check_other_types(kind.load, folder=tmp_path)
