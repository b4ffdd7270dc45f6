"""Training of encoders: the loss, pairs of text, whole runs, and the folders that they write."""

import dataclasses
import json
import os
import random
import shutil
import signal
import warnings

import jax
import numpy as np
import pytest
import retrieval_support
from process_support import Job
from storage_support import memory, upload
from training_support import losses

from lcjax.checkpoints.build import ModelSection
from lcjax.checkpoints.orbax_io import load_state
from lcjax.checkpoints.run_folder import load_run
from lcjax.data import DataConfig
from lcjax.errors import InputError
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.retrieval import BertEncoder, open_encoder
from lcjax.retrieval.datastore import EncoderSection
from lcjax.retrieval.training import Contrastive, ContrastiveTask, TrainedEncoder, contrastive_loss
from lcjax.retrieval.training_pairs import Crops, InverseCloze, PairRows, Records, open_pairs
from lcjax.training import batches, loop, run
from lcjax.training.tracking import read
from lcjax.training.train_config import EvalSection, RunSection, TrainConfig, TrainSection
from lcjax.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_once")

LETTERS = "abcdefghijklmnop"
WORDS = [*(f"{x}{i}" for x in LETTERS for i in (0, 1)), *".:", "query", "passage"]
STEPS = 40


def write_bert(folder, seed=0, prefix="", **changes):
    return retrieval_support.write_bert(folder, WORDS, seed, prefix, **changes)


def write_pairs(path, num=48, negatives=0):
    """Words with a 0 are of queries, those with a 1 of passages; a letter joins both."""
    pick, lines = random.Random(0), []
    sets = sorted({tuple(sorted(pick.sample(LETTERS, 3))) for _ in range(2 * num)})[:num]
    pick.shuffle(sets)
    for letters in sets:
        record = {
            "query": " ".join(f"{x}0" for x in letters),
            "positive": " ".join(f"{x}1" for x in letters),
        }
        others = [" ".join(f"{x}1" for x in pick.sample(LETTERS, 3)) for _ in range(negatives)]
        lines.append(record | ({"negatives": others} if negatives else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_text(path, num=24):
    pick = random.Random(1)
    words = [word for word in WORDS if word[0] in LETTERS]
    for i in range(num):
        sentences = (" ".join(pick.choices(words[i : i + 6], k=6)) for _ in range(8))
        path.mkdir(exist_ok=True)
        (path / f"{i:02}.txt").write_text(". ".join(sentences).replace(". ", " .\n\n"))
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "plays")


def settings(
    folder, bert, pairs, *, data=None, mesh=None, retriever=None, evaluation=None, **train
):
    section = EncoderSection(path=str(bert), pooling="mean", normalize=True)
    kinds = {"query_tokens": 10, "passage_tokens": 12, "encoder": section, "pairs": pairs}
    numbers = {"steps": STEPS, "batch_size": 16, "lr": 1e-2, "warmup_steps": 0, "log_every": 1}
    return TrainConfig(
        retriever=Contrastive(**kinds | (retriever or {})),
        data=DataConfig(**{"threads": 0, "prefetch": 0} | (data or {})),
        train=TrainSection(**numbers | {"save_every": 4} | train),
        mesh=mesh or Mesh(data=8, fsdp=1),
        run=RunSection(folder=str(folder)),
        eval=evaluation or EvalSection(),
    )


def recall_at_1(encoder, pairs):
    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    queries = encoder.encode_queries([record["query"] for record in records])
    passages = encoder.encode_passages([record["positive"] for record in records])
    return ((queries @ passages.T).argmax(1) == np.arange(len(records))).mean()


# The loss


def formula(queries, passages, weights, ids, temperature, symmetric):
    """The loss of each row, in float64, one row after another."""
    q, p = np.asarray(queries, np.float64), np.asarray(passages, np.float64)
    rows = [i for i in range(len(q)) if weights[i] > 0]
    total = 0.0
    for i in rows:
        own = q[i] @ p[i, 0] / temperature
        columns = [
            (j, n)
            for j in rows
            for n in range(p.shape[1])
            if (j, n) == (i, 0) or ids[j, n] != ids[i, 0]
        ]
        loss = np.log(sum(np.exp(q[i] @ p[j, n] / temperature) for j, n in columns)) - own
        if symmetric:
            others = [j for j in rows if j == i or ids[j, 0] != ids[i, 0]]
            back = np.log(sum(np.exp(q[j] @ p[i, 0] / temperature) for j in others)) - own
            loss = (loss + back) / 2
        total += weights[i] * loss
    return total, sum(weights)


def vectors(num_passages=3, rows=8, seed=0):
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(rows, 5)).astype(np.float32)
    passages = rng.normal(size=(rows, num_passages, 5)).astype(np.float32)
    ids = np.arange(rows * num_passages, dtype=np.int32).reshape(rows, num_passages)
    return queries, passages, np.ones(rows, np.float32), ids


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("num_passages", [1, 3])
def test_the_loss_is_the_formula(symmetric, num_passages):
    queries, passages, weights, ids = vectors(num_passages)
    ids[5, 0] = ids[2, 0]  # one passage twice
    ids[6, -1] = ids[1, 0]
    weights[[3, 7]] = 0
    options = dict(temperature=0.3, symmetric=symmetric)
    loss, count, parts = contrastive_loss(queries, passages, weights, ids, **options)
    expected = formula(queries, passages, weights, ids, *options.values())
    np.testing.assert_allclose((loss, count), expected, rtol=1e-5)
    assert 0 <= parts["accuracy"] <= 6


@pytest.mark.slow
def test_the_loss_and_its_gradient_are_those_of_one_device(bert, pairs, tmp_path):
    results = []
    for mesh in (Mesh(fsdp=8), Mesh(data=2, tensor=2, context=2), Mesh(data=1, fsdp=1)):
        devices = jax.devices()[: 1 if mesh.fsdp == 1 else 8]
        config = settings(tmp_path, bert, Records(str(pairs)), retriever={"symmetric": True})
        task = ContrastiveTask(config, make_mesh(mesh, devices))
        trained, frozen = task.load()
        batch = batches.put(next(task.open_loader("train")), task.mesh)
        objective = task.objective("train")

        def mean(params, objective=objective, frozen=frozen, batch=batch):
            loss, count, _ = objective(params, frozen, batch, None)
            return loss / count

        loss, grads = jax.jit(jax.value_and_grad(mean))(trained)
        results.append((float(loss), {path: np.asarray(x) for path, x in flatten(grads).items()}))
    *others, (loss, grads) = results
    assert loss > 1
    for other, other_grads in others:
        assert other == pytest.approx(loss, rel=1e-5)
        for path, grad in grads.items():
            np.testing.assert_allclose(other_grads[path], grad, atol=2e-5, err_msg=path)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_passage_that_equals_the_positive_is_no_negative(symmetric):
    queries, passages, _, ids = vectors(1)
    passages[4], ids[4] = passages[1], ids[1]
    options = dict(temperature=3.0, symmetric=symmetric)

    # Weights of the other rows are tiny: they are negatives, and add no loss.
    weights = np.where(np.arange(8) == 1, 1.0, 1e-12)

    @jax.jit
    def loss_of_row_1(ids):
        def loss(queries, passages):
            return contrastive_loss(queries, passages, weights, ids, **options)[0]

        return jax.value_and_grad(loss, argnums=(0, 1))(queries, passages)

    loss, (_, grad) = loss_of_row_1(ids)
    assert np.abs(grad[4]).max() < 1e-6 < np.abs(grad[5]).max()
    distinct = ids.copy()
    distinct[4] = 1000
    assert loss_of_row_1(distinct)[0] > loss + 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_without_weight_change_nothing(symmetric):
    full, padded = vectors(2, 8), vectors(2, 8, seed=1)
    mixed = [np.concatenate([a, b]) for a, b in zip(full, padded)]
    mixed[2][8:] = 0
    mixed[3][8:] = 0

    def loss(queries, passages, weights, ids):
        options = dict(temperature=0.1, symmetric=symmetric)
        return contrastive_loss(queries, passages, weights, ids, **options)[0]

    one, other = (jax.value_and_grad(loss, argnums=(0, 1))(*x) for x in (full, mixed))
    np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
    for grad, longer in zip(one[1], other[1]):
        np.testing.assert_allclose(longer[:8], grad, atol=1e-6)
        np.testing.assert_array_equal(longer[8:], 0)


# Runs


def validated(folder, bert, pairs, steps):
    return settings(
        folder,
        bert,
        Records(str(pairs)),
        data={"holdout": 0.1},
        evaluation=EvalSection(every=steps // 2),
        steps=steps,
        save_every=steps,
        checksums=True,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory, bert, pairs):
    folder = tmp_path_factory.mktemp("reference") / "run"
    config = validated(folder, bert, pairs, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_loss", lambda *_: None)
        return folder, run(config), config


@pytest.mark.slow
def test_the_loss_falls_and_recall_rises(tmp_path, bert, pairs):
    folder = tmp_path / "run"
    metrics = run(validated(folder, bert, pairs, STEPS))
    by_step = losses(folder)
    assert by_step[1] > 2.5 and by_step[STEPS] < 0.5 * by_step[1]
    before = BertEncoder.load(bert, pooling="mean", normalize=True)
    after = open_encoder(folder / "model")
    assert recall_at_1(before, pairs) < 0.3 and recall_at_1(after, pairs) > 0.7
    rows = [row for row in read(folder / "metrics.jsonl") if "validation_loss" in row]
    assert [row["step"] for row in rows] == [0, STEPS // 2, STEPS]
    assert 1 <= rows[0]["validation_queries"] < 16
    assert metrics["queries"] == 16 and 0.5 < metrics["accuracy"] <= 1
    assert metrics["queries_per_second"] > 0 and metrics["mfu"] > 0


@pytest.mark.slow
def test_a_run_opens_as_the_encoder_that_it_wrote(reference):
    folder = reference[0]
    encoder, model = open_encoder(folder), open_encoder(folder / "model")
    assert encoder.fingerprint == model.fingerprint and encoder.normalize
    assert EncoderSection(path=str(folder)).open().fingerprint == model.fingerprint
    with pytest.raises(InputError, match="this run trains an encoder, not a language model"):
        load_run(folder)


def test_a_run_that_has_not_ended_is_no_encoder_yet(reference, tmp_path):
    shutil.copy(reference[0] / "config.yaml", tmp_path / "config.yaml")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match="has not written model/ yet; start its command again"):
        open_encoder(tmp_path)


def test_the_folder_holds_the_trained_weights_bit_by_bit(reference, bert, pairs):
    folder, _, config = reference
    mesh = make_mesh(Mesh(fsdp=1), jax.devices()[:1])
    trained = TrainedEncoder(config.retriever.encoder, mesh, None)
    params = trained.take_params(0)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    state = load_state(folder, {"params": abstract})["params"]
    exported = open_encoder(folder / "model")
    for path, leaf in flatten(state).items():
        np.testing.assert_array_equal(leaf, flatten(exported.passage.params)[path], err_msg=path)
    texts = [json.loads(line)["query"] for line in pairs.read_text().splitlines()]
    np.testing.assert_array_equal(
        trained.with_params(state).encode_queries(texts), exported.encode_queries(texts)
    )


def test_transformers_gives_the_same_vectors(reference, pairs):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = reference[0] / "model"
    texts = [json.loads(line)["query"] for line in pairs.read_text().splitlines()]
    model = transformers.BertModel.from_pretrained(path, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state.double().numpy()
    mask = batch["attention_mask"].numpy()[..., None]
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
    assert np.abs(pooled - open_encoder(path).encode_queries(texts)).max() < 1e-5


def test_sentence_transformers_gives_the_same_vectors(reference, pairs):
    package = pytest.importorskip("sentence_transformers")
    model = package.SentenceTransformer(str(reference[0] / "model"), device="cpu")
    texts = [json.loads(line)["query"] for line in pairs.read_text().splitlines()]
    difference = model.encode(texts) - open_encoder(reference[0] / "model").encode_queries(texts)
    assert np.abs(difference).max() < 1e-5


def test_a_changed_byte_of_the_written_folder_is_found(reference, tmp_path):
    path = shutil.copytree(reference[0] / "model", tmp_path / "model")
    (path / "vocab.txt").write_text((path / "vocab.txt").read_text() + "new\n")
    with pytest.raises(InputError, match=r"vocab\.txt is not as it was written"):
        open_encoder(path)


@pytest.mark.slow
def test_resuming_after_kill_9_has_bit_equal_losses_and_weights(
    tmp_path, bert, text, compiled_once
):
    def config(name):
        data = {"path": str(text), "shuffle_rows": 4}
        changes = {"negatives": 0, "query_tokens": 12}
        options = {"steps": 9, "ema": 0.9, "data": data, "retriever": changes}
        return settings(tmp_path / name, bert, Crops(length=24, least=0.2), **options)

    run(config("whole"))
    # Equal bits need the flags of XLA that this process has.
    options = {"processes": 1, "devices": 8, "XLA_FLAGS": os.environ["XLA_FLAGS"]}
    job = Job(config("parts"), tmp_path, compiled_once, ACTION="0 6 SIGKILL", **options)
    assert job.end()[0][0] == -signal.SIGKILL
    assert sorted(losses(tmp_path / "parts")) == [1, 2, 3, 4, 5, 6]
    run(config("parts"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    models = [open_encoder(tmp_path / name).passage.params for name in ("parts", "whole")]
    jax.tree.map(np.testing.assert_array_equal, *models)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(data=8, fsdp=1), Mesh(fsdp=4, tensor=2)])
def test_two_processes_have_the_losses_of_one_and_write_the_same_encoder(
    tmp_path, bert, pairs, compiled_once, mesh
):
    def config(name):
        source = Records(str(pairs))
        options = {"steps": 4, "mesh": mesh, "data": {"holdout": 0.2}, "save_every": 2}
        options |= {"evaluation": EvalSection(every=2)}
        return settings(tmp_path / name, bert, source, **options)

    run(config("one"))
    job = Job(config("two"), tmp_path, compiled_once).end()
    assert [code for code, _ in job] == [0, 0], "\n".join(log[-3000:] for _, log in job)
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-5)
    encoders = [open_encoder(tmp_path / name) for name in ("one", "two")]
    texts = [json.loads(line)["query"] for line in pairs.read_text().splitlines()]
    vectors = [encoder.encode_queries(texts) for encoder in encoders]
    np.testing.assert_allclose(*vectors, atol=1e-3)


def test_titles_of_a_trained_dpr_are_read_as_in_the_folder_that_it_writes(tmp_path):
    folder = write_bert(tmp_path / "ctx", 0, "ctx_encoder.bert_model.", model_type="dpr")
    trained = TrainedEncoder(EncoderSection(path=str(folder)), None, None)
    index = trained.with_params(trained.take_params(seed=0))
    dpr = BertEncoder.load(folder)
    title, text = "harbour", "the town is quiet"
    expected = dpr.encode_passages([f"{title} {text}"])
    np.testing.assert_array_equal(index.encode_passages([text], [title]), expected)
    assert (dpr.encode_passages([text], [title]) != expected).any()  # a pair


@pytest.mark.slow
def test_two_encoders_are_written_as_query_and_passage(tmp_path, bert, pairs):
    passage, query = (
        write_bert(tmp_path / name, seed, f"{name}_encoder.bert_model.", model_type="dpr")
        for seed, name in enumerate(("ctx", "question"))
    )
    section = EncoderSection(path=str(passage), query_folder=str(query), query_prefix="query: ")
    folder = tmp_path / "run"
    config = settings(
        folder,
        bert,
        Records(str(pairs)),
        retriever={"encoder": section, "temperature": 1.0},
        steps=4,
        trainable=(r"^query/layers", "embeddings"),
    )
    run(config)
    assert sorted(os.listdir(folder / "model")) == ["passage", "query"]
    encoder = open_encoder(folder)
    assert encoder.pooling == "cls" and not encoder.normalize
    assert encoder.prefixes == ("query: ", "") and not encoder.passage.folder.is_dpr
    before = BertEncoder.load(passage, query_folder=query)
    for side, layers_differ in (("query", True), ("passage", False)):
        one, two = (flatten(getattr(x, side).params) for x in (before, encoder))
        for path, leaf in one.items():
            differs = path.startswith("embed/") or (layers_differ and path.startswith("layers/"))
            if differs and "key/bias" not in path:  # which no softmax depends on
                assert (leaf != two[path]).any(), (side, path)
            elif not differs:
                np.testing.assert_array_equal(leaf, two[path], err_msg=f"{side} {path}")
    # What was trained is trained on.
    again = dataclasses.replace(section, path=str(folder), query_folder=None, query_prefix=None)
    run(
        settings(
            tmp_path / "again",
            bert,
            Records(str(pairs)),
            retriever={"encoder": again},
            steps=2,
        )
    )
    assert open_encoder(tmp_path / "again").prefixes == ("query: ", "")
    overwritten = dataclasses.replace(
        settings(folder, bert, Records(str(pairs)), steps=1),
        run=RunSection(str(folder), existing="overwrite"),
    )
    run(overwritten)
    assert open_encoder(folder).pooling == "mean"


@pytest.mark.slow
def test_adapters_are_merged_into_the_written_folder(tmp_path, bert, pairs):
    config = settings(
        tmp_path / "run",
        bert,
        Records(str(pairs)),
        steps=3,
        lora=LoRA(rank=2, targets=("query", "value")),
        retriever={"encoder": EncoderSection(path=str(bert), pooling="mean", dtype="bfloat16")},
        accumulation=2,
    )
    run(config)
    before = flatten(BertEncoder.load(bert, pooling="mean").passage.params)
    after = flatten(open_encoder(tmp_path / "run").passage.params)
    assert before.keys() == after.keys()
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert changed == {f"layers/attention/{name}/kernel" for name in ("query", "value")}


# Pairs


def open_batches(pairs, bert, data, negatives=0, batch_size=8, split="train", **options):
    encoder = BertEncoder.load(bert, pooling="mean", **options)
    rows = PairRows(encoder.passage.folder.tokenizer, encoder.prefixes, 10, 16, negatives)
    data = DataConfig(**{"threads": 0, "prefetch": 0} | data)
    return open_pairs(
        pairs, rows, data, batch_size=batch_size, local_rows=range(batch_size), split=split
    )


def words(row):
    return [WORDS[i - 5] for i in row if i >= 5]  # special tokens precede the words


def test_records_of_dpr_are_read(tmp_path, bert):
    records = [
        {
            "question": f"{x}0 b0",
            "answers": ["a1"],
            "positive_ctxs": [{"title": "c1", "text": f"{x}1", "score": 1.0}],
            "negative_ctxs": [],
            "hard_negative_ctxs": [{"title": "", "text": f"d{i}"} for i in (0, 1)],
        }
        for x in LETTERS
    ]
    (tmp_path / "dpr.json").write_text(json.dumps(records))
    pairs = Records(str(tmp_path / "dpr.json"))
    loader = open_batches(pairs, bert, {}, 1, passage_prefix="passage: ")
    seen = []
    for _ in range(4):
        batch = next(loader)
        assert batch["query"].shape == (8, 10) and batch["passages"].shape == (8, 2, 16)
        for query, (positive, negative) in zip(batch["query"], batch["passages"]):
            letter = words(query)[0][0]
            seen.append((letter, words(negative)[-1]))
            assert words(positive) == ["passage", ":", "c1", f"{letter}1"]
        np.testing.assert_array_equal(batch["query_length"], 4)
        np.testing.assert_array_equal(batch["passage_lengths"], [[6, 5]] * 8)
        assert (batch["weights"] == 1).all()
    assert {letter for letter, _ in seen[:16]} == set(LETTERS)  # an epoch
    assert {negative for _, negative in seen} == {"d0", "d1"}  # drawn anew


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json"])
def test_pairs_in_a_bucket_are_those_of_a_local_file(tmp_path, bert, pairs, name):
    lines = pairs.read_text().splitlines()
    for text in (lines, lines[::-1]):  # the second time the file has changed
        text = f"[{','.join(text)}]" if name.endswith(".json") else "\n".join(text)
        (tmp_path / name).write_text(text)
        url = upload(tmp_path, memory("pairs")) / name
        local, remote = (
            open_batches(Records(str(path)), bert, {}) for path in (tmp_path / name, url)
        )
        for _ in range(3):
            one, other = next(local), next(remote)
            np.testing.assert_array_equal(one["query"], other["query"])
            np.testing.assert_array_equal(one["passages"], other["passages"])


def test_held_out_records_are_not_trained_on_and_are_the_same_every_time(bert, pairs):
    def queries(split, count):
        loader = open_batches(Records(str(pairs)), bert, {"holdout": 0.3, "repeat": 1}, split=split)
        batches = [next(loader) for _ in range(count)]
        rows = np.concatenate([batch["query"][batch["weights"] > 0] for batch in batches])
        return {tuple(words(row)) for row in rows}

    held_out = queries("validation", 2)
    assert held_out == queries("validation", 2) and len(held_out) > 5
    assert not held_out & queries("train", 3)


def test_text_with_fewer_pairs_than_a_batch_raises_input_error(bert, text):
    crops = Crops(length=20)
    with pytest.raises(InputError, match=r"data has \d+ pairs for training, fewer"):
        open_batches(crops, bert, {"path": str(text)}, batch_size=1000)
    data = {"path": str(text), "min_document_tokens": 10_000, "holdout": 0.5}
    with pytest.raises(InputError, match=r"data\.holdout=0\.5 leaves no pair for validation"):
        open_batches(crops, bert, data, split="validation")


def test_crops_are_parts_of_one_piece_and_differ_in_every_epoch(bert, text):
    crops = Crops(length=20, least=0.2, most=0.5, delete=0.0)
    loader = open_batches(crops, bert, {"path": str(text), "shuffle": False})
    documents = [path.read_text().split() for path in sorted(text.iterdir())]
    epochs = []
    for _ in range(2):
        rows = [next(loader) for _ in range(3)]
        epochs.append(np.concatenate([batch["query"] for batch in rows]))
        for batch in rows:
            for query, (passage,) in zip(batch["query"], batch["passages"]):
                sizes = len(words(query)), len(words(passage))
                assert all(3 <= size <= 10 for size in sizes)

                def sources(crop):
                    joined = " ".join(words(crop))
                    return {i for i, d in enumerate(documents) if joined in " ".join(d)}

                assert sources(query) & sources(passage)
    deleted = open_batches(
        Crops(length=20, delete=0.5), bert, {"path": str(text), "shuffle": False}
    )
    assert sum(next(deleted)["query_length"]) < epochs[0][:8].astype(bool).sum()
    assert not np.array_equal(*epochs)


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_a_cloze_query_is_a_sentence_of_its_passage_or_left_out_of_it(bert, text, keep):
    loader = open_batches(InverseCloze(keep=keep), bert, {"path": str(text)})
    documents = [" ".join(path.read_text().split()) for path in sorted(text.iterdir())]
    for _ in range(3):
        batch = next(loader)
        for query, (passage,) in zip(batch["query"], batch["passages"]):
            query, passage = " ".join(words(query)), " ".join(words(passage))
            assert any(query in document for document in documents)
            assert (query in passage) == bool(keep)
            if keep:
                assert any(passage in document for document in documents)
            assert len(passage.split()) >= 6


def test_the_rows_of_processes_make_up_the_batch_and_a_position_is_restored(bert, text):
    def loader(rows):
        encoder = BertEncoder.load(bert, pooling="mean")
        maker = PairRows(encoder.passage.folder.tokenizer, encoder.prefixes, 10, 16, 0)
        data = DataConfig(path=str(text), threads=0, prefetch=0, shuffle_rows=4)
        return open_pairs(Crops(), maker, data, batch_size=8, local_rows=rows, split="train")

    whole, halves = loader(range(8)), [loader([0, 1, 4, 5]), loader([2, 3, 6, 7])]
    for _ in range(2):
        batch, parts = next(whole), [next(half) for half in halves]
        np.testing.assert_array_equal(batch["passages"][[0, 1, 4, 5]], parts[0]["passages"])
        np.testing.assert_array_equal(batch["passages"][[2, 3, 6, 7]], parts[1]["passages"])
    state = json.loads(json.dumps(whole.get_state()))
    expected, again = next(whole), loader(range(8))
    again.set_state(state)
    jax.tree.map(np.testing.assert_array_equal, next(again), expected)
    other = open_batches(Crops(delete=0.2), bert, {"path": str(text), "shuffle_rows": 4})
    with pytest.raises(InputError, match=r"retriever\.pairs\.delete was 0.1 when the position"):
        other.set_state(state)


# Bad input


def bad_records(tmp_path, *records):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Records(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": "none"}, r"retriever\.pairs\.path=.* is no file; name a \.jsonl"),
        ({"pairs": ""}, r"retriever\.pairs\.path is empty"),
        ({"pairs": [{"query": "a0"}]}, r"bad\.jsonl:1 has no positive passage; add one, or leave"),
        ({"pairs": [{"positive": "a0"}]}, r"bad\.jsonl:1 has no query"),
        (
            {"pairs": [{"query": "a0", "positive": "a1"}] * 3},
            r"has 3 records, fewer than train\.batch_size=16; lower it",
        ),
        ({"retriever": {"negatives": 2}}, r"jsonl:1 has 0 negatives, and retriever\.negatives=2"),
        ({"pairs": Crops(), "retriever": {"negatives": 1}}, r"negatives=1 are read from records"),
        ({"pairs": Crops()}, r"data\.path is empty"),
        ({"data": {"path": "x"}}, r"data\.path and data\.sources are not read with"),
        ({"data": {"length": 64}}, r"data\.length=64 describes rows of a language model; leave it"),
        ({"data": {"pack": "windows"}}, r"data\.pack=windows describes rows"),
        ({"encoder": "tiny"}, r"retriever\.encoder\.path=tiny"),
        ({"encoder": ""}, r"retriever\.encoder\.path is empty"),
        ({"encoder": "decoder"}, r"is for a DecoderEncoder, and only BERT encoders are trained"),
        ({"model": {"path": "m"}}, r"model\.path=m is of a language model, and a contrastive"),
        ({"offload": "parameters", "model": {"remat": "full"}}, r"model\.remat=full"),
        ({"batch_size": 12}, r"train\.batch_size=12 must be a multiple"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_weights_are_read(
    tmp_path, bert, pairs, monkeypatch, change, message
):
    monkeypatch.setattr(ContrastiveTask, "load", lambda _: pytest.fail("weights were read"))
    change, source = dict(change), Records(str(pairs))
    if "pairs" in change:
        source = change.pop("pairs")
        if isinstance(source, list):
            source = bad_records(tmp_path, *source)
        elif isinstance(source, str):
            source = Records(source and str(tmp_path / source))
    encoder = change.pop("encoder", str(bert))
    if encoder == "decoder":
        (tmp_path / "decoder").mkdir()
        (tmp_path / "decoder/config.json").write_text('{"model_type": "llama"}')
        encoder = tmp_path / "decoder"
    model = change.pop("model", None)
    config = settings(tmp_path / "run", encoder, source, **change)
    if model:
        config = config.replace(model=ModelSection(**model))
    with pytest.raises(InputError, match=message) as error:
        run(config)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_the_least_share_of_crops_is_at_most_the_largest():
    with pytest.raises(InputError, match=r"least=0\.6 must be above 0 and at most most=0\.5"):
        Crops(least=0.6)


def test_texts_longer_than_the_encoder_reads_raise_input_error(tmp_path, bert, pairs):
    config = settings(tmp_path / "run", bert, Records(str(pairs)), retriever={"passage_tokens": 64})
    with pytest.raises(InputError, match=r"passage_tokens=64 is more than the 40 tokens that"):
        run(config)


@pytest.mark.slow
def test_records_without_a_positive_can_be_left_out(tmp_path, bert, capsys):
    good = [{"query": f"{x}0", "positive": [f"{x}1"]} for x in LETTERS]
    source = bad_records(tmp_path, {"query": "a0", "positive": []}, *good)
    data = {"on_bad_record": "skip"}
    run(settings(tmp_path / "run", bert, source, data=data, steps=1))
    assert "bad.jsonl:1 has no positive passage" in capsys.readouterr().err


def test_a_run_of_another_kind_is_not_resumed(reference, pairs, bert):
    _, _, config = reference
    changed = dataclasses.replace(config.retriever, temperature=0.1)
    with pytest.raises(InputError, match=r"retriever\.temperature=0\.1 but the run .* began with"):
        run(config.replace(retriever=changed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loop.run(config)["step"] == 2  # complete already
