"""Training of encoders by a language model: REPLUG-LSR and the marginals of REALM and RAG."""

import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from process_support import Job
from retrieval_support import write_bert
from training_support import losses

pytest.importorskip("bm25s")

from lcjax import LanguageModel
from lcjax.checkpoints import save_hf
from lcjax.checkpoints.build import ModelSection
from lcjax.checkpoints.build import build as build_model
from lcjax.data import ChatSource, DataConfig, TextConfig, TokenSource
from lcjax.data.loader import document_number
from lcjax.errors import InputError
from lcjax.generation.replug import Replug
from lcjax.models.distill import Distill
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.retrieval import (
    LSR,
    BertEncoder,
    BuildConfig,
    Chunking,
    Datastore,
    Document,
    EncoderSection,
    Marginal,
    build,
    open_encoder,
)
from lcjax.retrieval.end_to_end import EndToEndTask, _split_row, log_prior, lsr_loss, marginal_nll
from lcjax.retrieval.token_batches import LengthLimit
from lcjax.retrieval.training import TrainedEncoder
from lcjax.training import batches, run
from lcjax.training import folder as training_folder
from lcjax.training.language_modelling import make_task
from lcjax.training.tracking import read
from lcjax.training.train_config import EvalSection, RunSection, TrainConfig, TrainSection
from lcjax.tree import flatten, nest

pytestmark = pytest.mark.usefixtures("compiled_once")

B, K, T = 3, 4, 5


@pytest.fixture
def values():
    """Scores, -log p, scored tokens and which passages there are; the last query has one."""
    rng = np.random.default_rng(0)
    scored = (rng.random((B, T)) < 0.7).astype(np.float32)
    scored[:, 0] = 1
    has_passage = np.ones((B, K), bool)
    has_passage[1, 2:], has_passage[2, 1:] = False, False
    scores = rng.normal(size=(B, K)).astype(np.float32)
    nll = rng.exponential(size=(B, K, T)).astype(np.float32)
    return scores, nll, scored, has_passage


def softmax(x):
    return jnp.exp(x) / jnp.exp(x).sum()


def naive_lsr(scores, nll, scored, has_passage, temperature, lm_temperature):
    """The formula of the paper, query by query."""
    losses = []
    for row in range(B):
        mean = (nll[row] * scored[row]).sum(-1) / scored[row].sum()
        num = has_passage[row].sum()
        p = softmax(scores[row, :num] / temperature)
        q = softmax(-mean[:num] / lm_temperature)
        losses.append((p * jnp.log(p / q)).sum())
    return jnp.stack(losses)


def naive_marginal(scores, nll, scored, has_passage, temperature, marginal):
    """Products and sums of probabilities, without logarithms but the last."""
    losses = []
    for row in range(B):
        num = has_passage[row].sum()
        prior = softmax(scores[row, :num] / temperature)
        tokens = jnp.exp(-nll[row, :num]) ** scored[row]
        if marginal == "sequence":
            p = (prior * tokens.prod(-1)).sum()
        else:
            p = (prior[:, None] * tokens).sum(0).prod()
        losses.append(-jnp.log(p))
    return jnp.stack(losses)


def both(ours, naive, scores, nll):
    """Losses and gradients of a weighted sum of them; of the formula in float64."""
    weights = np.arange(1, B + 1)

    def of(loss, *args):
        both = jax.jit(lambda *x: (loss(*x), jax.grad(total(loss), (0, 1))(*x)))
        return both(*args)

    def total(loss):
        return lambda *x: (loss(*x) * weights).sum()

    actual = of(ours, scores, nll)
    with jax.enable_x64():
        expected = of(naive, *(np.asarray(x, np.float64) for x in (scores, nll)))
        assert expected[0].dtype == jnp.float64
    return actual, expected


def close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_lsr_equals_the_formula_and_has_no_gradient_into_the_language_model(values):
    scores, nll, *masks = values
    temperatures = {"temperature": 0.3, "lm_temperature": 0.2}
    (loss, (by_scores, by_nll)), (expected, (expected_by_scores, _)) = both(
        lambda scores, nll: lsr_loss(scores, nll, *masks, **temperatures),
        lambda scores, nll: naive_lsr(scores, nll, *masks, **temperatures),
        scores,
        nll,
    )
    close((loss, by_scores), (expected, expected_by_scores))
    assert not np.any(by_nll) and loss[2] == 0 and np.all(loss[:2] > 0)


@pytest.mark.parametrize("marginal", ["sequence", "token"])
def test_marginals_equal_the_formula_with_gradients_into_both_models(values, marginal):
    scores, nll, scored, has_passage = values

    def ours(scores, nll):
        log_p = log_prior(scores, has_passage, 0.7)
        return marginal_nll(log_p, nll, scored, marginal=marginal)

    naive = {"temperature": 0.7, "marginal": marginal}
    actual, expected = both(
        ours, lambda *x: naive_marginal(*x, scored, has_passage, **naive), scores, nll
    )
    close(actual, expected)
    _, (by_scores, by_nll) = actual
    assert np.all(by_scores[:2][has_passage[:2]] != 0) and np.any(by_nll)
    # With one passage it is the language model's own loss, and the encoder learns nothing.
    assert not np.any(by_scores[2])
    np.testing.assert_allclose(actual[0][2], (nll[2, 0] * scored[2]).sum(), rtol=1e-6)


def test_the_marginals_differ_with_several_passages_and_tokens(values):
    scores, nll, scored, has_passage = values

    @jax.jit
    def losses():
        log_p = log_prior(scores, has_passage, 1.0)
        return [marginal_nll(log_p, nll, scored, marginal=m) for m in ("token", "sequence")]

    token, sequence = losses()
    assert np.all(np.abs(token - sequence)[:2] > 1e-3)
    np.testing.assert_allclose(token[2], sequence[2], rtol=1e-6)


def test_a_query_without_passages_gives_finite_losses_and_gradients(values):
    scores, nll, scored, _ = values
    absent = np.zeros((B, K), bool)

    def total(scores):
        lsr = lsr_loss(scores, nll, scored, absent, temperature=0.1, lm_temperature=0.1)
        log_p = log_prior(scores, absent, 1.0)
        return lsr.sum() + marginal_nll(log_p, nll, scored, marginal="token").sum()

    loss, gradient = jax.jit(jax.value_and_grad(total))(scores)
    assert np.isfinite(loss) and not np.any(gradient)


# Whole runs: questions whose answers stand in one of the passages


LETTERS = "abcdefghijklmnop"
WORDS = [f"{letter}{i}" for letter in LETTERS for i in (0, 1)]
NUM = 16  # passages
ANSWERS = "QRSTUVWXYZ@&%$!~"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Folders `bert`, `lm`, `store`, and `questions.jsonl`.

    Words with a 0 are of questions, those with a 1 of passages; the encoder has to learn that they
    belong together. The language model predicts a byte as often as the text before it has it.
    """
    out = tmp_path_factory.mktemp("toy")
    write_bert(out / "bert", WORDS)
    write_counting_lm(out / "lm")
    pick, questions, passages = random.Random(0), [], []
    for i in range(NUM):
        letters = pick.sample(LETTERS, 3)
        question = " ".join(f"{letter}0" for letter in letters)
        questions.append({"question": f"{question} ", "answer": ANSWERS[i] * 5})
        text = " ".join(f"{letter}1" for letter in letters)
        passages.append({"text": f"{text} {ANSWERS[i] * 16}"})
    for name, records in (("questions", questions), ("passages", passages)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (out / f"{name}.jsonl").write_text(lines)
    text = TextConfig(path=str(out / "passages.jsonl"))
    build(BuildConfig(text, Chunking("words", 20), out=str(out / "store"), workers=1))
    return out


def write_counting_lm(folder):
    """Saves a decoder of two layers, each of which adds the mean of half of the embeddings."""
    model, params, tokenizer = build_model(ModelSection(preset="tiny"))
    flat = {path: np.zeros(x.shape, np.float32) for path, x in flatten(params).items()}
    for path in flat:
        if path.endswith("scale"):
            flat[path] += 1
    embedding = np.random.default_rng(0).normal(size=flat["embed/embedding"].shape)
    flat["embed/embedding"] += 0.02 * embedding
    flat["head/kernel"] += 0.1 * embedding.T
    value, out = flat["layers/attention/value/kernel"], flat["layers/attention/out/kernel"]
    for layer in range(2):
        for head in range(2):  # of keys and values; each is read by two heads
            place = 32 * layer + 16 * head
            value[layer, place : place + 16, head] = np.eye(16)
            out[layer, 2 * head, :, place : place + 16] = np.eye(16)
    save_hf(folder, nest(flat), model.config, tokenizer)


def config(toy, folder, section, *, data=None, mesh=None, model=None, evaluation=None, **train):
    kinds = {"encoder": EncoderSection(str(toy / "bert"), pooling="mean", normalize=True)}
    kinds |= {"store": str(toy / "store"), "k": 8, "query_tokens": 12, "passage_tokens": 30}
    source = ChatSource(str(toy / "questions.jsonl"), prompt="{question}", answer="{answer}")
    data = {"sources": [source], "length": 20, "pack": "single"} | (data or {})
    numbers = {"steps": 6, "batch_size": 8, "lr": 1e-2, "warmup_steps": 0, "log_every": 1}
    kind, options = section
    return TrainConfig(
        model=ModelSection(path=str(toy / "lm")) if model is None else model,
        retriever=kind(**kinds | options),
        data=DataConfig(**{"threads": 0, "prefetch": 0} | data),
        train=TrainSection(**numbers | {"save_every": 2} | train),
        mesh=mesh or Mesh(fsdp=8),
        run=RunSection(folder=str(folder)),
        eval=evaluation or EvalSection(),
    )


def recall_at_1(toy, encoder):
    questions, passages = (
        [json.loads(line) for line in (toy / f"{name}.jsonl").read_text().splitlines()]
        for name in ("questions", "passages")
    )
    queries = encoder.encode_queries([record["question"] for record in questions])
    vectors = encoder.encode_passages([record["text"] for record in passages])
    return ((queries @ vectors.T).argmax(1) == np.arange(NUM)).mean()


LSR_FAST = LSR, {"temperature": 0.2, "lm_temperature": 1.0, "refresh": 10}
MARGINALS = [
    (Marginal, {"marginal": name, "temperature": 0.1, "refresh": 10})
    for name in ("sequence", "token")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "k"),
    [(LSR_FAST, 8), (MARGINALS[0], 16), (MARGINALS[1], 8)],
    ids=["lsr", "sequence", "token"],
)
def test_the_encoder_learns_to_find_the_passage_with_the_answer(section, k, toy, tmp_path):
    section, trainable = (section[0], section[1] | {"k": k}), ("retriever",)
    before = recall_at_1(toy, BertEncoder.load(toy / "bert", pooling="mean", normalize=True))
    steps = {"steps": 60, "batch_size": 16, "save_every": 60, "warmup_steps": 2}
    run(config(toy, tmp_path / "run", section, trainable=trainable, **steps))
    after = recall_at_1(toy, open_encoder(tmp_path / "run" / "model"))
    assert before < 0.3 and after > 0.8


# What is read, and from which vectors


@pytest.fixture(scope="module")
def texts(tmp_path_factory, toy):
    """Plain text of words, and a datastore of it beside that of `toy`."""
    out = tmp_path_factory.mktemp("texts")
    pick = random.Random(1)
    (out / "text").mkdir()
    for i in range(6):
        (out / "text" / f"{i}.txt").write_text(" ".join(pick.choices(WORDS, k=60)))
    text = TextConfig(path=str(out / "text"))
    build(BuildConfig(text, Chunking("words", 6), out=str(out / "store"), workers=1))
    return out


def plain(texts, **more):
    """Options of rows of plain text, whose passages are of other documents."""
    data = {"path": str(texts / "text"), "sources": [], "length": 40, "pack": "concat"}
    return {"data": data | more}


def loaded(config, devices=8):
    """A task with its trained and frozen parameters."""
    task = make_task(config, make_mesh(config.mesh, jax.devices()[:devices]))
    task.check()
    (Path(config.run.folder)).mkdir(parents=True, exist_ok=True)
    return task, *task.load()


def prepared(task, trained, step=0):
    batch = next(task.open_loader("train"))
    return batch, task.prepare(step, batch, trained)


def passages_of(task, batch, row):
    """Ids of the passages of a row, read off its tokens."""
    by_text = {
        tuple(task.tokenizer.encode(p.full_text)[:30]): p.id
        for p in task._store.passages(range(task._store.num_rows))
    }
    passages = []
    for tokens, start, has_passage in zip(
        batch["tokens"][row], batch["starts"][row], batch["has_passage"][row]
    ):
        if has_passage:  # behind BOS, and before a separator of two bytes
            head = int(tokens[0] == task.tokenizer.bos_id)
            passages.append(by_text[tuple(tokens[head : head + start - 2].tolist())])
    return passages


def best_passages(task, queries, vectors, k, documents=()):
    """Ids of the best passages of other documents, by brute force."""
    passages = task._store.passages(range(task._store.num_rows))
    order = np.argsort(-(queries @ vectors.T), kind="stable")
    ids = [passages[row] for row in order]
    return [p.id for p in ids if p.document not in documents][:k]


@pytest.mark.slow
def test_a_row_is_read_after_the_best_passages_of_other_documents(toy, texts, tmp_path):
    section = (Marginal, {"store": str(texts / "store"), "k": 3, "query_tokens": 14})
    task, trained, _ = loaded(config(toy, tmp_path, section, **plain(texts, shuffle=False)))
    rows, batch = prepared(task, trained)
    encoder = BertEncoder.load(toy / "bert", pooling="mean", normalize=True)
    stored = task._store.passages(range(task._store.num_rows))
    vectors = encoder.encode_passages([p.text for p in stored], [p.title for p in stored])
    names = [f"{i}.txt" for i in range(6)]
    num_scored = 0
    for row, tokens in enumerate(rows["tokens"]):
        own = {n for n in names if document_number(n) in rows["documents"][row]}
        assert own
        length = int((rows["segments"][row] == 1).sum())
        query = task.tokenizer.decode(tokens[:14], skip_special=True)
        queries = encoder.encode_queries([query])[0]
        assert passages_of(task, batch, row) == best_passages(task, queries, vectors, 3, own)
        place = np.arange(40)
        expected = (place >= 13) & (place < length) & (rows["weights"][row] > 0)
        np.testing.assert_array_equal(batch["scored"][row], expected)
        num_scored += expected.sum()
        for read_tokens, targets, start, end in zip(
            *(batch[name][row] for name in ("tokens", "targets", "starts", "lengths"))
        ):
            assert end == start + length and not read_tokens[end:].any()
            head = int(tokens[0] == task.tokenizer.bos_id)
            np.testing.assert_array_equal(read_tokens[:head], tokens[:head])
            np.testing.assert_array_equal(read_tokens[start + head : end], tokens[head:length])
            np.testing.assert_array_equal(targets[start:end], rows["targets"][row, :length])
    assert num_scored > 50
    np.testing.assert_array_equal(batch["weights"], batch["scored"])


def test_the_query_of_a_conversation_is_the_text_before_the_answer(toy, tmp_path):
    section = (LSR, {"k": 3, "query_tokens": 9})
    task, trained, _ = loaded(config(toy, tmp_path, section))
    rows, batch = prepared(task, trained)
    np.testing.assert_array_equal(batch["weights"], np.ones(8))
    for row, tokens in enumerate(rows["tokens"]):
        text = task.tokenizer.decode(tokens, skip_special=True)
        question = text[:9]  # "a0 b0 c0 " as bytes
        ids = task.encoder.bert.token_rows([question], None, True, LengthLimit(18, "error", ""))
        length = batch["query_lengths"][row]
        assert batch["query"][row, :length].tolist() == list(ids[0].tokens)
        assert batch["scored"][row].sum() == 6  # five bytes and EOS
        first = int(batch["scored"][row].argmax())
        np.testing.assert_array_equal(tokens[first + 1 : first + 6], ord(text[9]))


@pytest.mark.parametrize(
    "weights, query, scored",
    [
        ("0001110000", [1, 2, 3], [3, 4, 5]),
        ("1100011000", [3, 4, 5], [5, 6]),  # begins inside an answer
        ("1111111110", [0, 1, 2], [2, 3, 4, 5, 6, 7, 8]),  # plain text
        ("1111111111", [0, 1, 2], [2, 3, 4, 5, 6, 7]),  # of 8 tokens
        ("0000000000", [], []),
    ],
)
def test_a_row_is_split_at_its_first_whole_question(weights, query, scored):
    length = 8 if weights.endswith("11") else 10
    segments = np.where(np.arange(10) < length, 1, 2)
    row = _split_row(np.arange(10), np.array([*map(int, weights)]), segments, 3)
    assert (row.query, row.length) == (query, length)
    assert np.flatnonzero(row.scored).tolist() == scored


def test_passages_are_chosen_by_vectors_that_are_made_again_after_refresh_steps(toy, tmp_path):
    section = (LSR, {"k": 3, "refresh": 2})
    task, trained, _ = loaded(config(toy, tmp_path, section))
    other, _ = (TrainedEncoder(task.section.encoder, task.mesh, None).take_params(0), None)
    rng = np.random.default_rng(0)
    other = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype("f4"), other)
    rows, _ = prepared(task, trained)
    stored = task._store.passages(range(task._store.num_rows))
    old, new = (task.encoder.with_params(params) for params in (trained["retriever"], other))

    def expected(queries_by, vectors_by, row):
        query = task.tokenizer.decode(rows["tokens"][row][:10], skip_special=True)
        vectors = vectors_by.encode_passages([p.text for p in stored], [p.title for p in stored])
        return best_passages(task, queries_by.encode_queries([query])[0], vectors, 3)

    cases = [(0, old, old), (1, new, old), (2, new, new)]
    for step, queries_by, vectors_by in cases:
        params = trained if queries_by is old else {"retriever": other}
        batch = task.prepare(step, rows, params)
        for row in range(4):
            actual = passages_of(task, batch, row)
            assert actual == expected(queries_by, vectors_by, row), (step, row)
    assert expected(new, old, 0) != expected(new, new, 0)
    # Step 0 has no checkpoint, and is needed no more.
    assert [file.name for file in sorted((tmp_path / "index").glob("*.bin"))] == [
        "vectors-step000000002.bin"
    ]


def test_vectors_of_the_step_before_stay_for_a_halt_at_a_step_that_is_not_finite(toy, tmp_path):
    section = (LSR, {"k": 2, "refresh": 2})
    task, trained, _ = loaded(config(toy, tmp_path, section, save_every=1000))
    rows, _ = prepared(task, trained)
    for step in (2, 4, 6):
        task.prepare(step, rows, trained)
    names = [file.name for file in sorted((tmp_path / "index").glob("*.bin"))]
    # A halt saves step 5, and a kill starts from step 0.
    assert names == [f"vectors-step{step:09d}.bin" for step in (0, 4, 6)]


def test_a_checkpoint_that_is_still_written_keeps_its_vectors(toy, tmp_path):
    section = (LSR, {"k": 2, "refresh": 2})
    task, trained, _ = loaded(config(toy, tmp_path, section, save_every=4))
    rows, _ = prepared(task, trained)
    for step in (4, 6, 8):  # step 8 is validated before it is saved
        task.prepare(step, rows, trained)
    names = [file.name for file in sorted((tmp_path / "index").glob("*.bin"))]
    assert names == [f"vectors-step{step:09d}.bin" for step in (4, 8)]


def test_a_run_without_checkpoint_makes_the_vectors_of_another_encoder_anew(toy, tmp_path):
    batches = []
    for name, poolings in (("changed", ("mean", "max")), ("fresh", ("max",))):
        for pooling in poolings:
            encoder = EncoderSection(str(toy / "bert"), pooling=pooling, normalize=True)
            section = (LSR, {"k": 3, "encoder": encoder})
            task, trained, _ = loaded(config(toy, tmp_path / name, section))
            batch = prepared(task, trained)[1]
        batches.append(batch)
    jax.tree.map(np.testing.assert_array_equal, *batches)
    files = [tmp_path / name / "index/vectors-step000000000.bin" for name in ("changed", "fresh")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_vectors_that_the_datastore_has_are_not_made_again(toy, tmp_path):
    store = shutil.copytree(toy / "store", tmp_path / "store")
    section = EncoderSection(str(toy / "bert"), pooling="mean", normalize=True)
    Datastore(store).encode(section)
    index, results = (store / "index.json").read_bytes(), []
    for number, path in enumerate((toy / "store", store)):
        options = {"k": 3, "passages": "frozen", "store": str(path)}
        task, trained, _ = loaded(config(toy, tmp_path / str(number), (Marginal, options)))
        results.append(prepared(task, trained)[1])
        has_file = (tmp_path / str(number) / "index" / "vectors-step000000000.bin").is_file()
        assert has_file == (number == 0)
        task.prepare(1000, next(task.open_loader("train")), trained)  # never stale
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert (store / "index.json").read_bytes() == index


# The objective


def replug_nll(task, config, lm, batch, rows, scores, marginal):
    """-log p of every row by `Replug`, from the same passages and scores."""
    total = []
    for row, tokens in enumerate(rows["tokens"]):
        num = batch["has_passage"][row].sum()
        head = int(tokens[0] == task.tokenizer.bos_id)
        # BOS, the passage and the separator
        context = [batch["tokens"][row, j, : batch["starts"][row, j] + head] for j in range(num)]
        first = int(batch["scored"][row].argmax())
        last = int(np.flatnonzero(batch["scored"][row])[-1])
        text = np.append(tokens[head : last + 1], rows["targets"][row, last])
        replug = Replug(lm, config.retriever.temperature, marginal=marginal)
        first += 1 - head
        nll = replug.nll(text[None], context=[context], scores=[scores[row, :num]], first=first)
        total.append(nll.sum())
    return total


@pytest.mark.slow_except("plain-token")
@pytest.mark.parametrize("section", [LSR_FAST, *MARGINALS], ids=["lsr", "sequence", "token"])
@pytest.mark.parametrize("is_plain", [False, True], ids=["questions", "plain"])
def test_the_objective_is_the_formula_over_separate_passes(section, is_plain, toy, texts, tmp_path):
    kind, options = section
    options = (
        options | {"k": 3, "temperature": 0.4} | ({"lm_temperature": 0.7} if kind is LSR else {})
    )
    more = plain(texts) if is_plain else {}
    if is_plain:
        options |= {"store": str(texts / "store"), "query_tokens": 14}
    settings = config(toy, tmp_path, (kind, options), **more)
    task, trained, frozen = loaded(settings)
    rows, batch = prepared(task, trained)
    placed = batches.put(batch, task.mesh)
    loss, count, _ = jax.jit(task.objective("train"))(trained, frozen, placed, jax.random.key(0))
    assert count == batch["weights"].sum()
    encoder = task.encoder.with_params(trained["retriever"])
    stored = {p.id: p for p in task._store.passages(range(task._store.num_rows))}
    queries = [
        task.tokenizer.decode(tokens[:14] if is_plain else tokens[:10], skip_special=True)
        for tokens in rows["tokens"]
    ]
    scores = np.zeros(batch["has_passage"].shape)
    for row, query in enumerate(queries):
        passages = [stored[i] for i in passages_of(task, batch, row)]
        vectors = encoder.encode_passages([p.text for p in passages], [p.title for p in passages])
        scores[row, : len(passages)] = vectors @ encoder.encode_queries([query])[0]
    lm = LanguageModel.load(str(toy / "lm"))
    has_y = batch["scored"].any(-1)
    assert has_y.sum() > 4
    rows = {name: value[has_y] for name, value in rows.items()}
    batch = {name: value[has_y] for name, value in batch.items()}
    scores = scores[has_y]
    if kind is Marginal:
        expected = replug_nll(task, settings, lm, batch, rows, scores, options["marginal"])
    else:
        expected = []
        for row in range(len(scores)):
            one = {name: value[row : row + 1] for name, value in batch.items()}
            of_row = {name: value[row : row + 1] for name, value in rows.items()}
            nll = []
            for j in range(batch["has_passage"][row].sum()):
                alone = one | {name: one[name][:, j : j + 1] for name in ("tokens", "starts")}
                alone["has_passage"] = np.ones((1, 1), bool)
                total = replug_nll(task, settings, lm, alone, of_row, np.zeros((1, 1)), "token")
                nll.append(total[0] / batch["scored"][row].sum())
            p = np.array(softmax(scores[row, : len(nll)] / 0.4), np.float64)
            q = np.array(softmax(-np.array(nll) / 0.7), np.float64)
            expected.append((p * np.log(p / q)).sum())
    np.testing.assert_allclose(loss, np.sum(expected), rtol=2e-4)


def gradients(settings, devices=8):
    """Loss, and gradients by the trained and the frozen parameters, of the first batch."""
    task, trained, frozen = loaded(settings, devices)
    placed = batches.put(prepared(task, trained)[1], task.mesh)
    objective = task.objective("train")

    def mean(trained, frozen):
        loss, count, _ = objective(trained, frozen, placed, jax.random.key(0))
        return loss / count

    loss, by_tree = jax.jit(jax.value_and_grad(mean, argnums=(0, 1)))(trained, frozen)
    return float(loss), [{path: np.asarray(x) for path, x in flatten(x).items()} for x in by_tree]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "mesh"),
    [
        (LSR_FAST, Mesh(fsdp=8)),
        (LSR_FAST, Mesh(data=2, fsdp=2, context=2)),
        (MARGINALS[1], Mesh(data=2, fsdp=2, tensor=2)),
        (MARGINALS[0], Mesh(data=2, fsdp=2, context=2)),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(section, mesh, toy, tmp_path):
    other, (other_by_trained, _) = gradients(config(toy, tmp_path / "all", section, mesh=mesh))
    one = config(toy, tmp_path / "one", section, mesh=Mesh(fsdp=1))
    loss, (by_trained, _) = gradients(one, devices=1)
    assert other == pytest.approx(loss, rel=2e-5)
    for path, gradient in by_trained.items():
        scale = max(np.abs(gradient).max(), 1e-3)
        actual = other_by_trained[path]
        np.testing.assert_allclose(actual, gradient, atol=2e-4 * scale, err_msg=path)


@pytest.mark.slow
def test_what_has_a_gradient(toy, tmp_path):
    def largest(gradients):
        return {path: np.abs(gradient).max() for path, gradient in gradients.items()}

    _, by_part = gradients(config(toy, tmp_path / "lsr", LSR_FAST))
    by_encoder, by_lm = map(largest, by_part)
    assert all(path.startswith("retriever/") for path in by_encoder)
    assert by_encoder["retriever/layers/mlp/up/kernel"] > 0 and not any(by_lm.values())

    options = {"k": 1, "temperature": 0.1}
    _, (by_encoder, _) = gradients(config(toy, tmp_path / "one", (Marginal, options)))
    by_path = largest(by_encoder)
    assert not any(x for path, x in by_path.items() if path.startswith("retriever/"))
    assert by_path["layers/attention/value/kernel"] > 0

    # RAG: all is trained but the encoder of passages.
    options = {"passages": "frozen", "temperature": 0.1}
    _, trained, frozen = loaded(config(toy, tmp_path / "frozen", (Marginal, options)))
    assert {"retriever/query/layers/mlp/up/kernel", "embed/embedding"} < flatten(trained).keys()
    assert all(path.startswith("retriever/passage/") for path in flatten(frozen))


# Whole runs


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [5, 7], ids=["before a refresh", "after a refresh"])
def test_a_killed_and_resumed_run_has_the_same_bits(kill_at, toy, whole, tmp_path, monkeypatch):
    """Steps 0, 3 and 6 make the vectors; checkpoints are of steps 2, 4 and 6."""
    prepare = EndToEndTask.prepare

    def killed(self, step, batch, params):
        if step == kill_at:
            raise Killed
        return prepare(self, step, batch, params)

    settings = config(toy, tmp_path / "run", *WHOLE[:1], **WHOLE[1])
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(EndToEndTask, "prepare", killed)
        run(settings)
    resumed = []
    with monkeypatch.context() as patch:
        patch.setattr(
            EndToEndTask,
            "prepare",
            lambda self, step, *args: resumed.append(step) or prepare(self, step, *args),
        )
        run(settings)
    assert resumed[0] == kill_at - 1
    assert losses(tmp_path / "run") == losses(whole)
    for name in ("model", "language_model"):
        one, other = (folder / name / "model.safetensors" for folder in (tmp_path / "run", whole))
        assert one.read_bytes() == other.read_bytes()


WHOLE = (
    (Marginal, {"marginal": "token", "temperature": 0.1, "refresh": 3}),
    {"steps": 8, "ema": 0.9, "keep": 1},
)


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(config(toy, folder, *WHOLE[:1], **WHOLE[1]))
    return folder


@pytest.mark.slow
def test_two_processes_equal_one(toy, compiled_once, tmp_path):
    options = {"temperature": 0.1, "refresh": 2}
    settings = [config(toy, tmp_path / name, (Marginal, options), steps=5) for name in "ab"]
    run(settings[0])
    job = Job(settings[1], tmp_path, compiled_once).end()
    assert [code for code, _ in job] == [0, 0], "\n".join(log[-3000:] for _, log in job)
    one, two = (losses(tmp_path / name) for name in "ab")
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-4)


@pytest.mark.slow
def test_a_run_writes_both_models_and_keeps_the_vectors_of_its_checkpoint(toy, whole):
    names = sorted(file.name for file in (whole / "index").iterdir())
    # Those of steps before may stay until the next refresh.
    assert names[0] == "passages.json" and names[-1] == "vectors-step000000006.bin"
    before = BertEncoder.load(toy / "bert", pooling="mean", normalize=True)
    assert open_encoder(whole).fingerprint != before.fingerprint
    lm = LanguageModel.load(str(whole / "language_model"))
    old = LanguageModel.load(str(toy / "lm"))
    assert np.any(flatten(lm.params)["head/kernel"] != flatten(old.params)["head/kernel"])
    settings = config(toy, whole, *WHOLE[:1], **WHOLE[1])
    run(settings)  # of a finished run nothing is left to do
    assert training_folder.finished(settings)


@pytest.mark.slow
def test_vectors_that_a_checkpoint_needs_are_missing(toy, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "index" / "vectors-step000000006.bin").unlink()
    settings = config(toy, folder, *WHOLE[:1], **WHOLE[1] | {"steps": 9})
    settings = settings.replace(run=RunSection(str(folder), accept=("train.steps",)))
    with pytest.raises(InputError, match="000006.bin is missing, which holds .* from step 6"):
        run(settings)


@pytest.mark.slow
def test_the_loss_on_held_out_questions_and_frozen_passages(toy, tmp_path):
    options = {"passages": "frozen", "temperature": 0.1}
    run(
        config(
            *(toy, tmp_path / "run", (Marginal, options)),
            data={"holdout": 0.3},
            evaluation=EvalSection(every=2),
            steps=4,
            lora=LoRA(rank=2),
        )
    )
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 2, 4]
    encoder = open_encoder(tmp_path / "run")
    before = BertEncoder.load(toy / "bert", pooling="mean", normalize=True)
    for side, is_trained in (("query", True), ("passage", False)):
        one, two = (flatten(getattr(x, side).params) for x in (before, encoder))
        assert is_trained == any(np.any(one[path] != two[path]) for path in one)
    base, merged = (
        LanguageModel.load(str(path)) for path in (toy / "lm", tmp_path / "run" / "language_model")
    )
    base, merged = flatten(base.params), flatten(merged.params)
    differing = {path for path in base if np.any(base[path] != merged[path])}
    assert differing and all("/attention/" in path for path in differing)


# Bad input


@pytest.mark.parametrize(
    ("section", "more", "match"),
    [
        (LSR_FAST, {"model": ModelSection()}, r"model.path=null: give a checkpoint"),
        ((LSR, {"k": 17}), {}, r"retriever.k=17 is more than the 16 passages of .*store; lower it"),
        ((LSR, {"store": "nowhere"}), {}, r"retriever.store=nowhere holds no datastore: give a"),
        (
            (LSR, {"encoder": EncoderSection("LM")}),
            {},
            r"retriever.encoder.path=.*lm is for a DecoderEncoder, and only BERT encoders are trai",
        ),
        ((LSR, {"encoder": EncoderSection()}), {}, r"retriever.encoder.path is empty"),
        (
            (LSR, {"query_tokens": 20}),
            {},
            r"data.length=20 must be above retriever.query_tokens=20: the tokens behind the query",
        ),
        (LSR_FAST, {"lora": LoRA()}, r"train.lora adds adapters .* retriever.type=lsr does not"),
        (LSR_FAST, {"distill": Distill()}, r"train.distill does not go with retriever.type=lsr"),
        (MARGINALS[0], {"trainable": ("memory",)}, r"rule 'memory' matches no parameter"),
        (
            LSR_FAST,
            {"data": {"sources": [TokenSource("TOKENS")]}},
            r"does not name the documents .* or retriever.same_document=true",
        ),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(section, more, match, toy, tmp_path):
    kind, options = section
    if options.get("encoder") == EncoderSection("LM"):
        options = options | {"encoder": EncoderSection(str(toy / "lm"))}
    if "data" in more:
        folder = tmp_path / "tokens.bin"
        np.arange(3, 200, dtype=np.uint16).tofile(folder)
        more = {"data": {"sources": [TokenSource(str(folder))], "pack": "concat"}}
    with pytest.raises(InputError, match=match) as caught:
        run(config(toy, tmp_path / "run", (kind, options), **more))
    assert "\n" not in str(caught.value) and not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (
            Marginal,
            {"marginal": "words"},
            r"retriever.marginal='words' must be one of sequence",
        ),
        (
            Marginal,
            {"passages": "never"},
            r"retriever.passages='never' must be one of trained",
        ),
    ],
)
def test_values_that_no_training_has(kind, options, match):
    with pytest.raises(InputError, match=match):
        kind(**{"store": "store"} | options)


@pytest.mark.slow
def test_a_store_of_the_rows_own_document_raises_input_error_unless_that_is_allowed(toy, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "only.txt").write_text(" ".join(WORDS * 20))
    text, store = str(tmp_path / "text"), str(tmp_path / "store")
    build(BuildConfig(TextConfig(path=text), Chunking("words", 8), out=store, workers=1))
    data = {"path": text, "sources": [], "length": 24, "pack": "concat"}
    options = {"store": store, "k": 2, "query_tokens": 8}
    match = r"store has no passage for the first 8 queries; .* retriever.same_document=true if it"
    with pytest.raises(InputError, match=match):
        run(config(toy, tmp_path / "run", (LSR, options), data=data, steps=1))
    section = (LSR, options | {"same_document": True})
    assert run(config(toy, tmp_path / "same", section, data=data, steps=1))["queries"] == 8


@pytest.mark.slow
def test_a_run_resumes_only_with_the_same_passages(toy, tmp_path):
    store = shutil.copytree(toy / "store", tmp_path / "store")
    section = (LSR, {"store": str(store), "k": 2})
    run(config(toy, tmp_path / "run", section, steps=2))
    Datastore(store).append([Document("new", "a1 b1 c1")])
    settings = config(toy, tmp_path / "run", section, steps=4)
    settings = settings.replace(run=RunSection(str(tmp_path / "run"), accept=("train.steps",)))
    with pytest.raises(InputError, match="has other passages than when the run in .* began; put"):
        run(settings)
