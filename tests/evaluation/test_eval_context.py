"""Windows whose beginning is read beside the decoder: who reads what, and what is refused."""

import dataclasses
import importlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from evaluation_support import NotingModel, records, texts
from retrieval_support import WORDS, WordEncoder, write_bert
from tiny_lm import ids, sharp_lm

from lcjax.checkpoints.build import ModelSection
from lcjax.config import dump
from lcjax.cost import MemoryEstimate
from lcjax.data import TextConfig
from lcjax.errors import InputError
from lcjax.evaluation import (
    ContextSplit,
    EvalConfig,
    Icl,
    Method,
    OpenQa,
    Passkey,
    Perplexity,
    ReplugSplit,
    RunSection,
    run,
    study,
)
from lcjax.evaluation.eval_config import apply_method, encoders
from lcjax.evaluation.retrieval import RetrievalMethod, RetrievalWindowReader, RetrieverSection
from lcjax.evaluation.split import SplitModel
from lcjax.evaluation.task import Unit
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.replug import Replug
from lcjax.generation.sampling import Sampling
from lcjax.memory import CepeSection, QueryAware, RetroSection, SharedLlmSection, Tree
from lcjax.retrieval import EncoderSection, open_encoder
from lcjax.retrieval.reader import RetrievalReader

TINY = ModelSection(preset="tiny", memory=CepeSection(encoder="tiny-encoder", output_share=1.0))


@pytest.fixture(scope="module")
def lm():
    return LanguageModel.load(TINY)


@pytest.fixture
def score(lm):
    """A run whose model has been read already."""
    return lambda config: run(config, load=lambda section: lm)


@pytest.mark.parametrize(
    ("length", "decoder", "chunks"),
    [(4096, 2048, 8), (8192, 4096, 16), (32_768, 4096, 112), (131_072, 4096, 496)],
)
def test_windows_are_cut_as_in_the_papers_table(length, decoder, chunks):
    model, tokens = NotingModel(), np.arange(length)[None]
    split = ContextSplit().reader(model, length)
    nll = split.nll(tokens, first=length - 256, lengths=np.array([length]))
    ((read, (context, chunk), options),) = model.given
    np.testing.assert_array_equal(read, tokens[:, -decoder:])
    np.testing.assert_array_equal(np.concatenate(context[0]), tokens[0, :-decoder])
    assert (len(context[0]), {len(c) for c in context[0]}, chunk) == (chunks, {256}, 256)
    assert options["first"] == decoder - 256 and options["lengths"].tolist() == [decoder]
    assert model.length == decoder and nll.shape == tokens.shape and not nll[:, :-decoder].any()


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, []), (1, [16]), (2, [16, 16]), *((count, [4, 16, 16]) for count in (3, 4, 5, 9))],
)
def test_only_the_last_chunks_before_the_text_are_read(count, sizes):
    model, tokens = NotingModel(), np.arange(50)[None]
    split = ContextSplit(decoder=14, chunk=16, chunks=count).reader(model, 50)
    split.nll(tokens, first=40, lengths=[50])
    ((_, (context, _), _),) = model.given
    assert [len(chunk) for chunk in context[0]] == sizes
    expected = tokens[0, 36 - sum(sizes) : 36]
    np.testing.assert_array_equal(np.concatenate([[], *context[0]]), expected)
    assert split.num_unread(50) == 36 - sum(sizes)


def test_a_decoder_that_reads_the_whole_window_has_no_context():
    model = NotingModel()
    ContextSplit(decoder=10**6).reader(model, 50).nll(np.arange(50)[None], first=1, lengths=[50])
    ((tokens, (context, _), options),) = model.given
    assert tokens.shape == (1, 50) and context == [[]] and options["first"] == 1


def test_prompts_leave_room_for_new_tokens_in_the_decoder():
    model = NotingModel()
    split = ContextSplit(decoder=20, chunk=16).reader(model, 60)
    split.generate([list(range(50)), list(range(8))], Sampling(max_new_tokens=10))
    ((prompts, (context, _), _),) = model.given
    assert prompts == [list(range(40, 50)), list(range(8))]
    assert [[len(c) for c in row] for row in context] == [[8, 16, 16], []]
    with pytest.raises(InputError, match="decoder=20 leaves no room"):
        split.generate([list(range(50))], Sampling(max_new_tokens=20))


def test_chunks_end_where_sentences_end_and_the_decoder_begins_with_one():
    text = "One is it. Two! " + "x" * 25 + " Is it so? Yes, it is. And so on it goes. The end."
    question = "\nWhat?"
    model = NotingModel()
    ids = model.tokenizer.encode(text + question)
    split = ContextSplit(decoder=40, chunk=16, sentences=True).reader(model, len(ids) + 5)
    prompts = split.with_movable([[(0, len(text))]], [()])
    prompts.generate([ids], Sampling(max_new_tokens=5))
    ((prompts, (context, _), _),) = model.given
    chunks = [model.tokenizer.decode(chunk) for chunk in context[0]]
    assert chunks[:2] == ["One is it. Two!", " " + "x" * 15]
    assert chunks[2:] == ["x" * 10 + " Is it", " so? Yes, it is."]
    assert model.tokenizer.decode(prompts[0]) == " And so on it goes. The end." + question
    assert len(prompts[0]) + 5 <= 40 and "".join(chunks) + " And" in text
    split.nll(np.asarray([ids]), first=len(ids) - 8, lengths=[len(ids)])
    assert [len(chunk) for chunk in model.given[1][1][0][0]] == [15, 16, 16, 10]
    with pytest.raises(InputError, match="leave one of them out"):
        ContextSplit(chunks=2, sentences=True)


def unit(index, document):
    tokens = np.arange(64, dtype=np.int32) + 1000 * document
    return Unit(index, (64,), tokens, {"document": document})


def test_foreign_chunks_are_those_of_other_documents_and_the_text_stays():
    units = [unit(i, i // 2) for i in range(8)]
    split = ContextSplit(decoder=32, chunk=8, source="foreign").reader(NotingModel(), 64)
    foreign = importlib.import_module("lcjax.evaluation.run")._with_foreign_context
    seen = set()
    for own in units:
        tokens = foreign(split, own, units, 0).tokens
        np.testing.assert_array_equal(tokens[32:], own.tokens[32:])
        documents = tokens[:32] // 1000
        assert own.fields["document"] not in documents
        np.testing.assert_array_equal(tokens[:32] % 1000, np.arange(32))
        assert all(len(set(documents[i : i + 8])) == 1 for i in range(0, 32, 8))
        np.testing.assert_array_equal(foreign(split, own, units, 0).tokens, tokens)
        seen |= set(documents.tolist())
    assert seen == {0, 1, 2, 3}
    own_context = ContextSplit(decoder=32).reader(NotingModel(), 64)
    assert foreign(own_context, units[0], units, 0).tokens is units[0].tokens
    with pytest.raises(InputError, match="all windows are of one"):
        foreign(split, units[0], units[:2], 0)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text").mkdir()
    for name, text in texts((140, 120, 150)):
        (tmp_path / "text" / f"{name}.txt").write_text(text)
    return EvalConfig(
        model=TINY,
        tasks=(Perplexity(protocol="last_k", last=16, windows_per_document=1),),
        lengths=(96,),
        stride=48,
        data=TextConfig(path=str(tmp_path / "text")),
        batch_size=3,
        run=RunSection(str(tmp_path / "out")),
    )


@pytest.mark.slow
def test_methods_with_different_contexts_score_the_same_text(config, lm, score):
    methods = (
        Method("usual"),
        Method("none", context=ContextSplit(chunks=0)),
        Method("foreign", context=ContextSplit(source="foreign")),
        Method("sharper", context=ContextSplit(trained_context=8)),
        Method("replug", replug=ReplugSplit(chunk=24)),
    )
    report = score(dataclasses.replace(config, methods=methods))
    cells = {cell["method"]: cell["loss"] for cell in report.cells}
    ids = [
        [lm.tokenizer.bos_id, *lm.tokenizer.encode(text)][:96] for _, text in texts((140, 120, 150))
    ]
    tokens = np.array(ids)

    def loss(nll):
        return pytest.approx(float(nll.mean(dtype=np.float64)), abs=1e-5)

    context = [[row[:48]] for row in tokens]
    assert cells["usual"] == loss(lm.nll(tokens[:, 48:], first=32, context=context)[:, 32:])
    assert cells["none"] == loss(lm.nll(tokens[:, 48:], first=32)[:, 32:])
    passages = [[row[:24], row[24:48], row[48:72]] for row in tokens]
    mixed = Replug(lm).nll(tokens[:, 72:], context=passages, first=8)
    assert cells["replug"] == loss(mixed[:, 8:])
    assert len(set(cells.values())) == 5
    assert len({cell["tokens_scored"] for cell in report.cells}) == 1
    read = {record["method"]: record["decoder"] for record in records(config, "perplexity_last_k")}
    assert read == {"usual": 48, "none": 48, "foreign": 48, "sharper": 48, "replug": 24}
    assert read == {cell["method"]: cell["decoder"] for cell in report.cells}


def mixture_weights(encoder, query, chunks, temperature):
    """softmax(product of the query's and each chunk's vector / temperature), float64."""
    vectors = [encoder.encode_passages([chunk])[0].astype(np.float64) for chunk in chunks]
    products = np.array(vectors) @ encoder.encode_queries([query])[0].astype(np.float64)
    powers = np.exp((products - products.max()) / temperature)
    return powers / powers.sum()


@pytest.fixture(scope="module")
def contriever(tmp_path_factory):
    """The settings of an encoder that pools as Contriever does, with random weights."""
    folder = write_bert(tmp_path_factory.mktemp("bert") / "encoder", WORDS)
    return EncoderSection(str(folder), pooling="mean", normalize=False)


@pytest.mark.slow
def test_replug_weighs_the_chunks_of_a_window_by_the_vectors_of_an_encoder(lm, contriever):
    """The mixture is the sum over chunks of softmax(similarity) x the model's probabilities."""
    rng = np.random.default_rng(0)
    rows = [" ".join(rng.choice(WORDS, 30))[:88] for _ in range(2)]
    tokens = np.array([lm.tokenizer.encode(row) for row in rows])
    split = ReplugSplit(decoder=40, chunk=24, temperature=0.1, encoder=contriever, query_tokens=20)
    nll = split.reader(lm, 88).nll(tokens, first=72, lengths=np.array([88, 80]))
    encoder = open_encoder(contriever.path, pooling="mean", normalize=False)
    for row, text in enumerate(rows):
        chunks = [text[:24], text[24:48]]
        weights = mixture_weights(encoder, text[48:68], chunks, 0.1)
        assert abs(weights[0] - 0.5) > 0.05  # equal weights give other numbers
        alone = [
            lm.nll(np.array([[*lm.tokenizer.encode(chunk), *tokens[row, 48:]]]), first=48)[0, 48:]
            for chunk in chunks
        ]
        expected = -np.log(weights @ np.exp(-np.array(alone, np.float64)))
        end = 88 if row == 0 else 80
        np.testing.assert_allclose(nll[row, 72:end], expected[: end - 72], atol=2e-4)
    equal = dataclasses.replace(split, encoder=None).reader(lm, 88)
    equal_nll = equal.nll(tokens, first=72, lengths=np.array([88, 88]))
    assert np.abs(equal_nll - nll)[0, 72:].max() > 0.01


def test_scores_of_chunks_are_products_with_the_first_tokens_after_them():
    encoder, split = WordEncoder(), ReplugSplit(decoder=40, chunk=24, query_tokens=12)
    model = NotingModel()
    reader = SplitModel(model, split, 40, 24, encoder)
    encode, words = model.tokenizer.encode, ["river stone", "silver window", "winter"]
    chunks, text = [np.array(encode(word)) for word in words], "garden river or winter"
    scores = [None, None, [3.0]]
    weighted, none, searched = reader._scores(scores, [chunks, [], chunks[:1]], [encode(text)] * 3)
    expected = encoder.encode_passages(words).astype(float) @ encoder.encode_queries([text[:12]])[0]
    np.testing.assert_allclose(weighted, expected, rtol=1e-12)
    assert abs(weighted[0] - weighted[1]) > 0.1  # "garden river" has a word of one of them
    assert none == [] and searched == [3.0]
    (equal,) = SplitModel(model, split, 40, 24)._scores([None], [chunks], [encode(text)])
    assert equal == [0.0, 0.0, 0.0]


def test_an_encoder_of_chunks_is_checked_before_models_are_read_and_belongs_to_the_records(
    config, score, contriever
):
    for encoder, words in (
        (
            EncoderSection("no/such/one"),
            r"^replug\.encoder\.path=no/such/one: no such file or folder",
        ),
        (EncoderSection(), r"^replug\.encoder\.path is empty: name an encoder"),
    ):
        methods = (Method("a", replug=ReplugSplit(decoder=32, chunk=24, encoder=encoder)),)
        with pytest.raises(InputError, match=words):
            run(dataclasses.replace(config, methods=methods), load=None)
    method = Method("a", replug=ReplugSplit(decoder=32, chunk=24, encoder=contriever))
    inputs = encoders(dataclasses.replace(config, methods=(Method("b"), method)))
    encoder = open_encoder(contriever.path, pooling="mean", normalize=False)
    assert inputs == {"encoder of method a": encoder.fingerprint}


@pytest.mark.slow
def test_trees_are_searched_for_the_scored_tokens_under_any_policy(config):
    section = SharedLlmSection(layers=1, chunk=16, ratios=(4, 2, 1), output_share=1.0)
    own = ModelSection(preset="tiny", memory=section)
    model = LanguageModel.load(own)
    methods = (
        Method("right"),
        Method("query", context=ContextSplit(policy=QueryAware())),
        Method("none", context=ContextSplit(chunks=0)),
        Method("sparse", context=ContextSplit(ratios=(8, 4))),
    )
    config = dataclasses.replace(config, model=own, methods=methods)
    report = run(config, load=lambda section: model)
    cells = {cell["method"]: cell["loss"] for cell in report.cells}
    assert len(set(cells.values())) == 4
    asking = model.with_method(memory=dataclasses.replace(model.config.memory, policy=QueryAware()))
    encode, bos = model.tokenizer.encode, model.tokenizer.bos_id
    tokens = np.array([[bos, *encode(text)][:96] for _, text in texts((140, 120, 150))])
    context = asking.encode_contexts([[row[:48]] for row in tokens], query=tokens[:, 48:80])
    expected = asking.nll(tokens[:, 48:], first=32, context=context)[:, 32:].mean()
    assert cells["query"] == pytest.approx(float(expected), abs=1e-5)
    memory = dataclasses.replace(model.config.memory, tree=Tree((8, 4)))
    sparse = model.with_method(memory=memory)
    expected = sparse.nll(tokens[:, 48:], first=32, context=[[row[:48]] for row in tokens])[:, 32:]
    assert cells["sparse"] == pytest.approx(float(expected.mean()), abs=1e-5)
    with pytest.raises(InputError, match="multiple of 2\\^5 = 32"):
        ContextSplit(ratios=(1,) * 5).reader(model, 96)
    with pytest.raises(InputError, match="trained_context=9 is a setting of Cepe, and this model"):
        ContextSplit(trained_context=9).reader(model, 96)


@pytest.mark.slow
def test_every_context_method_retrieves_a_key_from_the_context(config, score):
    # Instruction and question stay with the decoder: about 270 bytes.
    methods = (
        Method("usual", context=ContextSplit(decoder=400)),
        Method("replug", replug=ReplugSplit(decoder=400, chunk=100)),
    )
    task = Passkey(depths=2, max_new_tokens=3)
    report = score(dataclasses.replace(config, methods=methods, tasks=(task,), lengths=(900,)))
    assert [cell["windows"] for cell in report.cells] == [2, 2]


class Store:
    """Finds one of two passages for a query."""

    def search(self, queries, k):
        texts = [("abc", "hgf")["a" in query] * 5 for query in queries]
        passages = [types.SimpleNamespace(text=text, title="", id=text) for text in texts]
        return [[types.SimpleNamespace(passage=x, score=1.0)][:k] for x in passages]


@pytest.fixture
def store(monkeypatch):
    import lcjax.retrieval  # noqa: F401  whose parts import each other's real modules

    retriever = types.SimpleNamespace(open=lambda folder, **options: Store())
    module = types.SimpleNamespace(Retriever=retriever)
    monkeypatch.setitem(sys.modules, "lcjax.retrieval.retriever", module)
    monkeypatch.setattr(RetrieverSection, "fingerprint", "digest")


def test_a_method_retrieves_passages_by_its_section(lm, store):
    section = RetrievalMethod(RetrieverSection(".", k=3), "mixture", stride=8, query_tokens=4)
    model = apply_method(lm, Method("a", retrieval=section), 96)
    assert (model.k, model.how, model.when, model.query_tokens) == (3, "mixture", 8, 4)
    assert model.lm.length == 96 and model.decoder_tokens is None
    prompts = apply_method(lm, Method("a", retrieval=section), 96, prompts=True)
    assert prompts.lm.length is None and prompts.length == model.length == 96
    once = apply_method(lm, Method("a", retrieval=RetrievalMethod(RetrieverSection("."))), 96)
    assert (once.when, once.how, once.query_tokens) == ("once", "input", None)
    # A folder in the section leaves the default of k what it is.
    assert once.k == RetrievalReader.k == 4


@pytest.mark.slow
def test_perplexity_uses_the_retrieved_passages(config, lm, score, store):
    section = RetrieverSection(config.data.path, k=1)
    methods = (
        Method("once", retrieval=RetrievalMethod(section)),
        Method("strides", retrieval=RetrievalMethod(section, stride=4, query_tokens=2)),
        Method("memory", retrieval=RetrievalMethod(section, "context")),
        Method("end", retrieval=RetrievalMethod(section, "context", decoder=40)),
    )
    report = score(dataclasses.replace(config, methods=methods))
    cells = {cell["method"]: cell["loss"] for cell in report.cells}
    encode, bos = lm.tokenizer.encode, lm.tokenizer.bos_id
    tokens = np.array([[bos, *encode(text)][:96] for _, text in texts((140, 120, 150))])
    for name, options in (
        ("once", {}), ("strides", {"when": 4, "query_tokens": 2}), ("memory", {"how": "context"}),
    ):  # fmt: skip
        nll = RetrievalReader(lm, Store(), 1, **options).nll(tokens, first=80)[:, 80:]
        assert cells[name] == pytest.approx(float(nll.mean(dtype=np.float64)), abs=1e-5)
    nll = RetrievalReader(lm, Store(), 1, "context").nll(tokens[:, 56:], first=24)[:, 24:]
    assert cells["end"] == pytest.approx(float(nll.mean(dtype=np.float64)), abs=1e-5)
    assert len(set(cells.values())) == 4


class NotingReader(NotingModel):
    """Notes which texts are searched for."""

    def nll(self, tokens, *, searched, **options):
        self.given.append((tokens, searched, options))
        return np.ones(tokens.shape, np.float32)


def test_the_end_of_a_window_is_read_with_its_own_or_foreign_passages():
    units = [unit(i, i // 2) for i in range(8)]
    put_foreign = importlib.import_module("lcjax.evaluation.run")._with_foreign_context
    documents = set()
    for own in units:
        for source in ("own", "foreign"):
            model = RetrievalWindowReader(NotingReader(), 24, source)
            tokens = put_foreign(model, own, units, 0).tokens
            np.testing.assert_array_equal(tokens[40:], own.tokens[40:])
            nll = model.nll(tokens[None], first=56, lengths=np.array([64]))
            ((read, searched, options),) = model.lm.given
            np.testing.assert_array_equal(read[0], own.tokens[40:])
            assert options["first"] == 16 and options["lengths"].tolist() == [24]
            assert nll.shape == (1, 64) and nll[0, 40:].all() and not nll[0, :40].any()
            assert model.num_unread(64) == 40
            if source == "own":
                assert searched is None and tokens is own.tokens
                continue
            np.testing.assert_array_equal(searched[0] % 1000, np.arange(40, 64))
            (document,) = set((searched[0] // 1000).tolist())
            assert document != own.fields["document"]
            documents.add(document)
    assert len(documents) > 2
    with pytest.raises(InputError, match=r"retrieval\.source=foreign .* all windows are of one"):
        put_foreign(model, units[0], units[:2], 0)
    for reader, first, words in (
        (
            RetrievalWindowReader(None, 24),
            40,
            "scores tokens from 40 on, and the decoder reads from 40",
        ),
        (RetrievalWindowReader(None, 40, "foreign"), 60, "needs windows of 80 tokens"),
    ):
        with pytest.raises(InputError, match=words):
            reader.check_scored(64, first, 64)


@pytest.mark.slow
def test_consecutive_chunks_are_dealt_to_chunks_of_the_text_as_in_training():
    section = RetroSection(chunk=8, neighbours=2, neighbour_tokens=6, output_share=1.0)
    lm = LanguageModel.load(ModelSection(preset="tiny", memory=section))
    tokens = np.arange(3, 53)[None]
    split = ContextSplit(decoder=20, chunk=6, chunks=3).reader(lm, 50)
    actual = split.nll(tokens, first=34, lengths=np.array([50]))
    pieces = [tokens[0, n : n + 6] for n in (12, 18, 24)]
    context = [[pieces[:2], pieces[2:]]]
    expected = lm.nll(tokens[:, 30:], first=4, context=context)
    np.testing.assert_array_equal(actual[:, 30:], expected)
    assert not np.array_equal(
        expected, lm.nll(tokens[:, 30:], first=4, context=[[[p] for p in pieces]])
    )


@pytest.mark.slow
def test_cells_state_the_number_of_passages_of_the_decoder(config, score, tmp_path):
    passages = [{"text": f"text {n}.", "score": 5 - n} for n in range(5)]
    rows = [{"question": f"who is {n}?", "answer": "x", "ctxs": passages} for n in range(4)]
    (tmp_path / "own").mkdir()
    for name in ("test", "train"):
        text = "\n".join(json.dumps({**row, "question": name + row["question"]}) for row in rows)
        (tmp_path / "own" / f"{name}.jsonl").write_text(text)
    methods = (
        Method("text", context=ContextSplit(decoder=300, decoder_passages=2)),
        Method("caption", context=ContextSplit(decoder=300, decoder_passages=0)),
        Method("replug", replug=ReplugSplit(decoder=300)),
    )
    task = OpenQa(path=str(tmp_path), tasks=("own_5",), max_examples=2, max_new_tokens=3)
    report = score(dataclasses.replace(config, methods=methods, tasks=(task,), lengths=(600,)))
    read = {cell["method"]: cell["decoder_passages"] for cell in report.cells}
    assert read == {"text": 2, "caption": 0, "replug": 0}


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [  # fields of the method, which may raise themselves, and of the config
        (lambda: {"context": ContextSplit(), "replug": ReplugSplit()}, {}, "only one can be set"),
        (lambda: {"replug": ReplugSplit(), "retrieval": RetrievalMethod()}, {},
         "sets replug and retrieval, of which"),
        (lambda: {"context": ContextSplit(source="mine")}, {}, "source='mine'"),
        (lambda: {"context": ContextSplit(decoder=0)}, {}, "decoder=0"),
        (lambda: {"context": ContextSplit(chunk=65)}, {}, "chunk=65"),
        (lambda: {"context": ContextSplit()}, {"tasks": (Perplexity(),)},
         "protocol=slide_press scores tokens that the decoder of the method a does"),
        (lambda: {"context": ContextSplit()}, {"model": ModelSection(preset="tiny")}, "no memory"),
        (lambda: {"context": ContextSplit(source="foreign")}, {"tasks": (Passkey(),)},
         "passkey has prompts, and the method a reads chunks of other documents"),
        (lambda: {"replug": ReplugSplit(chunk=0)}, {}, "^replug.chunk=0 must"),
        (lambda: {"replug": ReplugSplit(chunk=48)}, {}, "at most 47"),
        (lambda: {"replug": ReplugSplit(source="mine")}, {}, "^replug.source='mine'"),
        (lambda: {"retrieval": RetrievalMethod(how="front")}, {}, "how='front'"),
        (lambda: {"retrieval": RetrievalMethod(source="mine")}, {}, "source='mine'"),
        (lambda: {"retrieval": RetrievalMethod(source="foreign")}, {}, "needs retr"),
        (lambda: {"retrieval": RetrievalMethod(RetrieverSection("."))}, {},
         r"^\. holds no datastore"),
        (lambda: {"retrieval": RetrievalMethod()}, {"tasks": (Passkey(),)},
         r"methods\.0\.retrieval\.retriever\.folder='' is no folder"),
        (dict, {"tasks": (Perplexity(),)}, "use protocol=last_k"),
    ],
)  # fmt: skip
def test_invalid_contexts_raise_input_error(config, score, method, changes, words):
    with pytest.raises(InputError, match=words) as caught:
        own = dataclasses.replace(config, methods=(Method("a", **method()),), **changes)
        (score if own.model == TINY else run)(own)
    assert "\n" not in str(caught.value)


def test_a_method_with_a_memory_raises_input_error_before_anything_is_scored(config, score):
    tasks = (Perplexity(protocol="last_k", last=48, windows_per_document=1),)
    methods = (Method("long", context=ContextSplit(decoder=90)), Method("usual"))
    with pytest.raises(InputError, match="scores tokens from 48 on, and the decoder reads from 48"):
        score(dataclasses.replace(config, methods=methods, tasks=tasks))
    assert not Path(config.run.folder).exists()


@pytest.mark.parametrize("trained", [False, True])
def test_a_memory_is_seen_before_a_model_is_read(config, lm, monkeypatch, tmp_path, trained):
    if trained:  # what a run folder says of its model
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "config.yaml").write_text("{}")
        dump(lm.config, tmp_path / "run" / "model.yaml")
        config = dataclasses.replace(config, model=ModelSection(path=str(tmp_path / "run")))
    monkeypatch.setattr(LanguageModel, "load", lambda *_, **more: pytest.fail("it was read"))
    with pytest.raises(InputError, match="slide_press scores .* the decoder of the method base"):
        run(dataclasses.replace(config, tasks=(Perplexity(),)))


def test_a_memory_is_seen_before_it_is_trained():
    steps = types.SimpleNamespace(steps=30, save_every=20)
    training, extended = (
        types.SimpleNamespace(run=types.SimpleNamespace(folder=folder), model=model, train=steps)
        for folder, model in (("runs/a", TINY), ("runs/b", ModelSection(path="runs/a/model")))
    )
    trainings = {"": training, "b": extended}
    for path in ("runs/b", "runs/b/checkpoints/20", "runs/b/checkpoints/30"):
        assert study.has_memory(ModelSection(path=path), trainings)
    assert not study.has_memory(ModelSection(preset="tiny"), trainings)


def test_what_a_run_needs_counts_the_rows_of_replug_and_the_second_cache_of_choices():
    module, calls = importlib.import_module("lcjax.evaluation.run"), []

    def needed(rows, length, context):
        calls.append((rows, length))
        return MemoryEstimate(weights=0, cache=10**9)

    def said(task):
        runner = object.__new__(module._Runner)
        data = TextConfig(path=__file__)
        runner._config = EvalConfig(tasks=(task,), batch_size=2, data=data)
        runner._lengths = [128]
        (line,) = runner._memory_lines(ModelSection(preset="tiny"), [method], model)
        return line

    method = Method("replug", replug=ReplugSplit(decoder=32, chunk=16))
    config = types.SimpleNamespace(max_length=128, memory=None)
    model = types.SimpleNamespace(
        config=config, mesh=None, shares_prefixes=False, inference_memory=needed
    )
    assert "(cache 1.0 + process 0.6), batch_size=2 of 48 tokens, 6 rows each" in said(Passkey())
    assert "(cache 2.0 + " in said(Icl())
    assert "cache" not in said(Perplexity())
    assert calls == [(12, 48), (12, 48), (2, 48)]


# Continuations of prompts whose beginning is read beside the decoder

PROMPTS = [ids(1, 60), ids(2, 20)]
OPTIONS = [[ids(3, 4), ids(4, 1)], [ids(5, 4), ids(6, 2)]]


@pytest.fixture(scope="module")
def sharp():
    return sharp_lm(memory=TINY.memory)


def assert_same_scores(found, wanted):
    for row, other in zip(found, wanted, strict=True):
        for one, two in zip(row, other, strict=True):
            np.testing.assert_allclose(one.nll, two.nll, atol=2e-5)
            assert one.greedy == two.greedy


@pytest.mark.slow
def test_of_a_prompt_too_long_for_the_decoder_the_beginning_is_read_beside_it(sharp):
    split = ContextSplit(decoder=32, chunk=16)
    # 32 tokens less four new ones are left: BOS stays, and so does what is not movable.
    split = split.reader(sharp, 128).with_movable([[(1, 59)], [(1, 19)]])
    result = split.continuations(PROMPTS, OPTIONS)
    beside, read = PROMPTS[0][1:33], [PROMPTS[0][:1] + PROMPTS[0][33:], PROMPTS[1]]
    context = sharp.encode_contexts([[beside[:16], beside[16:]], []], chunk=16)
    assert_same_scores(
        result, sharp.with_method(length=32).continuations(read, OPTIONS, context=context)
    )


@pytest.mark.slow
def test_replug_reads_the_same_prompt_once_behind_every_chunk(sharp):
    split = (
        ReplugSplit(decoder=32, chunk=16).reader(sharp, 128).with_movable([[(1, 59)], [(1, 19)]])
    )
    result = split.continuations(PROMPTS, OPTIONS)
    bos, rest, beside = PROMPTS[0][:1], PROMPTS[0][33:], PROMPTS[0][1:33]
    replug = Replug(sharp.with_method(length=48))
    context = [[bos + beside[:16], bos + beside[16:]], []]
    assert_same_scores(result, replug.continuations([rest, PROMPTS[1]], OPTIONS, context=context))


def test_continuations_that_leave_the_decoder_no_prompt_raise_input_error(sharp):
    split = ContextSplit(decoder=8, chunk=16).reader(sharp, 128)
    with pytest.raises(InputError, match="8 leaves no room for a prompt beside 8 new tokens"):
        split.continuations(PROMPTS[:1], [[ids(3, 8)]])
