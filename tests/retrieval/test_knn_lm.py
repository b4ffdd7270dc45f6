"""kNN-LM: the mixture in float64, keys by another computation, and builds that resume."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from tiny_lm import ids, sharp_lm, text

import lcjax.retrieval.knn_lm as knn_lib
from lcjax.attention import Landmark
from lcjax.checkpoints.build import ModelSection
from lcjax.config import parse
from lcjax.data import TextConfig, TextSource, TokenSource
from lcjax.errors import InputError
from lcjax.evaluation.eval_config import EvalConfig, apply_method
from lcjax.evaluation.run import check as check_config
from lcjax.files import CHECKSUMS
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.models import Decoder
from lcjax.models.decoder import random_params
from lcjax.retrieval.__main__ import main
from lcjax.retrieval.encoder import model_fingerprint
from lcjax.retrieval.knn_lm import KnnLM, TokenConfig, TokenStore, build_tokens
from lcjax.rope import DynamicNTK, Linear

GREEDY = Sampling(max_new_tokens=6, min_new_tokens=6)
WINDOW, OVERLAP = 24, 8
SENTENCES = (
    "the harbour was quiet in the morning and the boats lay still. ",
    "a letter came for the captain, who had left. ",
    "winter closed the river early that year. ",
)


@pytest.fixture(scope="module")
def lm():
    return sharp_lm()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number, sentence in enumerate(SENTENCES):
        (folder / f"{number}.txt").write_text(sentence * (1 + number))
    (folder / "empty.txt").write_text("")
    return folder


def config(corpus, out, **changes):
    options = {"window": WINDOW, "overlap": OVERLAP, "batch_size": 3, "dtype": "float32"}
    return TokenConfig(TextConfig(path=str(corpus)), out=str(out), **(options | changes))


@pytest.fixture(scope="module")
def store(lm, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stores") / "store"
    build_tokens(config(corpus, out), lm=lm)
    return TokenStore(out)


def documents(lm):
    return [lm.encode(sentence * (1 + n)) for n, sentence in enumerate(SENTENCES)]


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def hand_keys(lm, tokens):
    """Keys [T, D]: the states of a model without the last feed-forward, under its norm."""
    config = lm.model.config
    last, params = f"layers_{config.num_layers - 1}", dict(lm.params)
    layer = dict(params[last])

    def zero(tree):
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)

    layer["mlp"] = zero(layer["mlp"])
    norm = "mlp_norm"
    if config.block == "parallel":
        layer["attention"], norm = zero(layer["attention"]), "attention_norm"
    params |= {last: layer, "final_norm": layer[norm]}
    padded = np.pad(np.array([tokens]), [(0, 0), (0, 32 - len(tokens))])
    hidden = apply(lm.model, params, padded, lm.rotation(32))
    return np.asarray(hidden[0, : len(tokens)], np.float64)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, tokens, rotation):
    return model.apply({"params": params}, tokens, rotation=rotation).hidden


def oracle(lm, store, query, logits, *, k, weight, temperature):
    """log p [V] in float64 of the token after a state `query` [D]."""
    keys = np.asarray(store.keys, np.float64)
    distances = np.square(keys - query).sum(1)
    nearest = np.argsort(distances, kind="stable")[:k]
    weights = np.exp(-(distances[nearest] - distances.min()) / temperature)
    p = np.zeros(lm.config.vocab_size)
    for row, value in zip(nearest, weights / weights.sum(), strict=True):
        p[store.values[row]] += value
    return np.log(weight * p + (1 - weight) * np.exp(log_softmax(logits)))


# Keys and values


@pytest.mark.slow
def test_keys_are_the_inputs_of_the_last_feed_forward_and_values_the_next_tokens(lm, store):
    keys, values = [], []
    for tokens in documents(lm):
        for start in range(0, len(tokens) - 1, WINDOW - OVERLAP):
            window, first = tokens[start : start + WINDOW], OVERLAP if start else 1
            keys += list(hand_keys(lm, window)[first - 1 : -1])
            values += window[first:]
    assert values == [token for tokens in documents(lm) for token in tokens[1:]], "each once"
    assert store.values.tolist() == values
    np.testing.assert_allclose(store.keys, keys, atol=5e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"block": "parallel", "norm": "layer", "tie_embeddings": True},
        pytest.param({"block": "parallel"}, marks=pytest.mark.slow),
        pytest.param({"norm": "layer"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_keys_of_other_architectures(lm, change):
    model = Decoder(lm.config.replace(**change))
    other = LanguageModel(model, random_params(model.config, 0), lm.tokenizer)
    row = text(1, 17)
    keys = other.score(knn_lib._keys, row[None], with_ffn_input=True)[0]
    assert not keys[0].any(), "nothing predicts the first token"
    np.testing.assert_allclose(keys[1:], hand_keys(other, row)[:-1], atol=1e-5)


def test_scores_without_keys_are_those_of_nll(lm):
    tokens, lengths = text(2, 3, 20), np.array([20, 5, 1])
    options = {"first": 3, "lengths": lengths}
    _, nll = lm.score(knn_lib._keys_and_nll, tokens, with_ffn_input=True, **options)
    np.testing.assert_allclose(nll, lm.nll(tokens, **options), atol=1e-6)


def test_token_ids_are_read_as_they_are(lm, tmp_path):
    tokens = text(3, 30)
    (tmp_path / "data").mkdir()
    tokens.astype("<u2").tofile(tmp_path / "data" / "ids.bin")
    source = TokenSource(path=str(tmp_path / "data" / "ids.bin"), dtype="uint16", document_start=-1)
    data = TextConfig(sources=[source])
    build_tokens(dataclasses.replace(config("", tmp_path / "out"), data=data), lm=lm)
    assert TokenStore(tmp_path / "out").values.tolist() == tokens[1:].tolist()


def test_a_part_of_the_text(lm, store, corpus, tmp_path):
    build_tokens(config(corpus, tmp_path / "part", max_tokens=33), lm=lm)
    part = TokenStore(tmp_path / "part")
    assert len(part) == 33
    np.testing.assert_array_equal(part.values, store.values[:33])
    np.testing.assert_allclose(part.keys, store.keys[:33], rtol=1e-4, atol=5e-5)


def test_the_length_of_a_rotation_is_part_of_the_fingerprint(lm, store):
    scaled = lm.with_method(rope=DynamicNTK(factor=4.0, original_length=64))
    short, *longer = (model_fingerprint(scaled.with_method(length=n)) for n in (64, 512, 4096))
    assert short == model_fingerprint(scaled), "nothing is scaled up to 64 tokens"
    assert len({short, *longer}) == 3
    far = lm.with_method(length=4096)  # of a rope that does not follow it
    assert model_fingerprint(far) == store.index["fingerprint"]


# The mixture


SETTINGS = {"k": 20, "weight": 0.4, "temperature": 3.0}


def test_scores_equal_the_mixture_in_float64(lm, store):
    tokens, lengths, first = text(4, 2, 14), np.array([14, 9]), 3
    nll = KnnLM(lm, store, **SETTINGS).nll(tokens, first=first, lengths=lengths)
    logits = lm.logits(tokens)
    for row in range(2):
        queries = hand_keys(lm, tokens[row, : lengths[row]])
        assert not nll[row, :first].any() and not nll[row, lengths[row] :].any()
        for place in range(first, lengths[row]):
            log_p = oracle(lm, store, queries[place - 1], logits[row, place - 1], **SETTINGS)
            assert nll[row, place] == pytest.approx(-log_p[tokens[row, place]], abs=2e-4)


@pytest.mark.slow
def test_generated_tokens_are_picked_from_the_mixture(lm, store):
    knn, prompts = KnnLM(lm, store, **SETTINGS), [ids(5, 7), ids(6, 12)]
    texts, plain = knn.generate(prompts, GREEDY), lm.generate(prompts, GREEDY)
    assert [t.ids for t in texts] != [t.ids for t in plain], "the datastore changes something"
    for prompt, generated in zip(prompts, texts, strict=True):
        row = np.array([*prompt, *generated.ids])
        queries, logits = hand_keys(lm, row), lm.logits(row[None])[0]
        for place, token in enumerate(generated.ids, len(prompt) - 1):
            log_p = oracle(lm, store, queries[place], logits[place], **SETTINGS)
            log_p[list(lm.tokenizer.eos_ids)] = -np.inf
            assert log_p.argmax() == token
    assert "".join(piece.text for piece in knn.stream(prompts[:1], GREEDY)) == texts[0]


def test_continuations_are_scored_and_compared_by_the_mixture(lm, store):
    knn, prompt = KnnLM(lm, store, **SETTINGS), ids(5, 7)
    (greedy,) = knn.generate([prompt], Sampling(max_new_tokens=3, min_new_tokens=3))
    options = [list(greedy.ids), ids(7, 2)]
    scores = knn.continuations([prompt], [options])[0]
    assert [score.greedy for score in scores] == [True, False]
    lengths = np.array([len(prompt) + len(option) for option in options])
    rows = np.array([(prompt + option + [0] * 5)[:14] for option in options])
    whole = knn.nll(rows, first=len(prompt), lengths=lengths)
    for row, length, score in zip(whole, lengths, scores, strict=True):
        np.testing.assert_allclose(score.nll, row[len(prompt) : length], atol=1e-4)


@pytest.mark.slow
def test_weight_0_is_the_model_bit_by_bit(lm, store):
    knn, tokens, prompts = KnnLM(lm, store, k=5, weight=0), text(8, 2, 14), [ids(9, 5), ids(10, 9)]
    np.testing.assert_array_equal(knn.nll(tokens, first=2), lm.nll(tokens, first=2))
    random = dataclasses.replace(GREEDY, temperature=1.0, seed=3)
    for sampling in (GREEDY, random):
        assert knn.generate(prompts, sampling) == lm.generate(prompts, sampling)
    options = [[ids(11, 2)], [ids(12, 3)]]
    pairs = zip(knn.continuations(prompts, options), lm.continuations(prompts, options))
    for (one,), (other,) in pairs:
        np.testing.assert_array_equal(one.nll, other.nll)
    tiny = KnnLM(lm, store, k=5, weight=1e-9).nll(tokens, first=2)
    np.testing.assert_allclose(tiny, lm.nll(tokens, first=2), atol=1e-5)


def test_weight_1_is_the_datastore_alone(lm, store):
    row = [*documents(lm)[0][: WINDOW - 1], 255]
    nll = KnnLM(lm, store, k=3, weight=1).nll(np.array([row]))[0]
    assert (nll[2:-1] < 1e-3).all() and np.isinf(nll[-1])


def test_the_text_of_the_datastore_becomes_probable(lm, store):
    tokens = np.array([documents(lm)[1][:WINDOW]])
    plain = lm.nll(tokens)[0, 1:].mean()
    nll = KnnLM(lm, store, k=16).nll(tokens)[0, 1:].mean()
    assert plain > 4 and nll < 1.6, "at most -log 0.25 for each token"


@pytest.mark.slow
def test_a_model_with_landmarks(lm, corpus, tmp_path):
    other = lm.with_method(pattern=Landmark(block=4, token=258))
    build_tokens(config(corpus, tmp_path / "out", overlap=1), lm=other)
    store, row = TokenStore(tmp_path / "out"), documents(lm)[0][:WINDOW]
    knn = KnnLM(other, store, k=4)
    assert knn.nll(np.array([row]))[0, 1:].mean() < 1.6
    assert len(knn.generate([row[:9]], GREEDY)[0].ids) == 6
    with pytest.raises(InputError, match="fingerprint"):
        KnnLM(lm, store, k=4)


@pytest.mark.parametrize("kind", ["ivf", "ivf_pq"])
def test_an_approximate_index_that_visits_every_list_finds_the_same(
    lm, store, corpus, tmp_path, kind
):
    pytest.importorskip("faiss")
    build_tokens(config(corpus, tmp_path / "out", faiss=kind), lm=lm)
    other = TokenStore(tmp_path / "out")
    k = 8 if kind == "ivf" else len(other)  # codes may miss a neighbour, exact distances order
    tokens, options = text(4, 2, 14), {"k": k, "temperature": 5.0}
    knn, exact = KnnLM(lm, other, index=kind, **options), KnnLM(lm, store, **options)
    lengths = np.array([14, 9])
    actual, expected = (x.nll(tokens, first=3, lengths=lengths) for x in (knn, exact))
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    with pytest.raises(InputError, match="build it with --faiss"):
        KnnLM(lm, store, k=k, index=kind)


def test_a_search_visits_the_share_of_lists_of_the_paper_or_more(monkeypatch):
    made = {}
    monkeypatch.setattr(knn_lib.FaissIndex, "build", lambda keys, **options: made.update(options))
    for count, nlist in ((103_000_000, 4096), (135_000_000, 4096), (1_000_000, 1024), (20, 1)):
        knn_lib._build_faiss(np.broadcast_to(np.zeros(8, np.float16), (count, 8)), "ivf")
        assert (made["nlist"], made["nprobe"]) == (nlist, 32)


# Builds


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_killed_build_resumes(lm, store, corpus, tmp_path, monkeypatch, at):
    out, settings = tmp_path / "out", config(corpus, tmp_path / "out")
    plain, calls = knn_lib._read_batch, []

    def killed(*args):
        calls.append(args)
        if len(calls) > at:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(knn_lib, "_read_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        build_tokens(settings, lm=lm)
    for name in ("keys.bin", "values.bin"):  # written, but not counted
        with (out / name).open("ab") as file:
            file.write(b"123")
    with pytest.raises(InputError, match="incomplete|no datastore"):
        TokenStore(out)
    calls.clear()
    monkeypatch.setattr(knn_lib, "_read_batch", lambda *args: calls.append(1) or plain(*args))
    index = build_tokens(settings, lm=lm)
    assert len(calls) == -(-sum(1 for _ in _windows(lm)) // 3) - at, "the batches that were missing"
    assert files(out) == files(store.folder)
    monkeypatch.setattr(knn_lib, "_read_batch", None)
    assert build_tokens(settings, lm=lm) == index, "a complete folder is read only"
    assert store.check_files() == 2


def _windows(lm):
    for tokens in documents(lm):
        for start in range(0, len(tokens) - 1, WINDOW - OVERLAP):
            if len(tokens) > start + (OVERLAP if start else 1):
                yield start


@pytest.mark.slow
def test_the_command_builds_and_eval_reads(lm, corpus, tmp_path, capsys):
    out = tmp_path / "out"
    words = [f"--data.path={corpus}", "--model.preset=tiny", f"--out={out}", "--window=24"]
    assert main(["build-tokens", *words, "--overlap=8"]) == 0
    assert "tokens; evaluate with them" in capsys.readouterr().out
    methods = f"[{{name: base}}, {{name: knn, knn: {{folder: {out}, k: 9, weight: 0.5}}}}]"
    config = parse(EvalConfig, [f"--methods={methods}", "--model.preset=tiny", "--lengths=[512]"])
    check_config(config)
    model, tokens = LanguageModel.load(config.model), np.array([documents(lm)[0][:20]])
    base, knn = (apply_method(model, method, 512) for method in config.methods)
    assert isinstance(knn, KnnLM) and (knn.k, knn.weight, knn.temperature) == (9, 0.5, 1.0)
    assert knn.store.keys.dtype == np.float16
    assert knn.nll(tokens).mean() < base.nll(tokens).mean() / 2


# Bad input


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"k": 10_000}, "k=10000 must be at most"),
        ({"k": 0}, "k=0"),
        ({"weight": -0.1}, "weight=-0.1 must be a number 0 <= x <= 1"),
        ({"weight": 1.5}, "weight=1.5"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"temperature": 0}, "temperature=0"),
        ({"index": "flat"}, "index='flat'"),
    ],
)
def test_settings_that_do_not_fit(lm, store, changes, words):
    with pytest.raises(InputError, match=words) as error:
        KnnLM(lm, store, **({"k": 4} | changes))
    assert "\n" not in str(error.value)
    settings = json.dumps({"folder": str(store.folder)} | changes)
    if "k" not in changes or not changes["k"]:  # a model is needed for the others
        with pytest.raises(InputError, match="methods.0.knn"):
            check_config(parse(EvalConfig, [f"--methods=[{{name: knn, knn: {settings}}}]"]))


def test_another_model_raises_input_error(lm, store):
    others = [
        LanguageModel.load(ModelSection(preset="tiny", seed=1)),
        lm.with_method(rope=Linear(factor=2)),
    ]
    for other in others:
        with pytest.raises(InputError, match=f"{store.index['model']}.*fingerprint") as error:
            KnnLM(other, store, k=4)
        assert "\n" not in str(error.value)
    KnnLM(lm.with_method(length=999), store, k=4)


def test_damaged_folders(lm, corpus, tmp_path):
    out = tmp_path / "out"
    build_tokens(config(corpus, out), lm=lm)
    good = (out / "keys.bin").read_bytes()
    for bad in (good[:-1], good + b"1", b""):
        (out / "keys.bin").write_bytes(bad)
        with pytest.raises(InputError, match=r"keys\.bin is damaged"):
            TokenStore(out)
    (out / "keys.bin").write_bytes(b"\xff" * 4 + good[4:])
    with pytest.raises(InputError, match="not as it was written"):
        TokenStore(out)
    (out / CHECKSUMS).unlink()  # as in a datastore of an older version
    with pytest.raises(InputError, match="not as it was written"):
        TokenStore(out).check_files()
    with pytest.raises(InputError, match="row 0"):
        KnnLM(lm, TokenStore(out), k=4).nll(text(1, 1, 9))
    (out / "keys.bin").write_bytes(good)
    values = (out / "values.bin").read_bytes()
    (out / "values.bin").write_bytes(b"\xff" * 4 + values[4:])
    with pytest.raises(InputError, match=r"values\.bin is damaged"):
        KnnLM(lm, TokenStore(out), k=4)
    (out / "index.json").write_text("{}")
    with pytest.raises(InputError, match="no datastore of tokens"):
        TokenStore(out)
    with pytest.raises(InputError, match="build-tokens"):
        TokenStore(corpus)


def test_builds_that_do_not_fit(lm, corpus, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text(" \n")
    build_tokens(config(corpus, out), lm=lm)
    before = files(out)
    for changes, words in (
        ({"window": 20}, "window"),
        ({"data": TextConfig(path=str(tmp_path / "short"))}, "(documents|text)"),
    ):
        with pytest.raises(InputError, match=f"was made with.*{words}"):
            build_tokens(dataclasses.replace(config(corpus, out), **changes), lm=lm)
    with pytest.raises(InputError, match="was made with fingerprint of the model"):
        build_tokens(config(corpus, out), lm=lm.with_method(rope=Linear(factor=2)))
    assert files(out) == before
    with pytest.raises(InputError, match="enough text"):
        build_tokens(config(tmp_path / "short", tmp_path / "none"), lm=lm)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "retrieved.json").write_text("{}")
    with pytest.raises(InputError, match="rows has rows of type retrieved, which are no documents"):
        build_tokens(config(tmp_path / "rows", tmp_path / "none"), lm=lm)
    assert not (tmp_path / "none" / "index.json").exists()
    for changes, words in (
        ({"overlap": WINDOW - 1}, "overlap=23"),
        ({"overlap": 0}, "overlap=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"faiss": "flat"}, "faiss='flat'"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ):
        with pytest.raises(InputError, match=words):
            dataclasses.replace(config(corpus, "x"), **changes)
    source = TextSource(path=str(corpus), weight=1.0)
    assert TokenConfig(TextConfig(sources=[source]), out="x").window == 1024
