"""Weights against attention itself and against a softmax by hand; masks against definitions."""

import jax
import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from tiny_lm import ids, sharp_lm

from lcjax import LanguageModel, pictures
from lcjax.attention import AttentionMetadata, Landmark, Pattern, SelfExtend, ShiftedSparse, Sliding
from lcjax.attention.base import rotate_qk
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation.sampling import Sampling
from lcjax.generation.watched import watch
from lcjax.pictures import command
from lcjax.rope import E2LLM, E2Positions, Linear, PlainPositions, Yarn
from pallas_kernels import causal, tables, window

NAMES = sorted(Pattern.get_known_choices())


@pytest.fixture(scope="module")
def lm():
    return sharp_lm()


@pytest.fixture(scope="module")
def sliding_picture(tmp_path_factory):
    """The pixels of a window of 4 over 32 tokens."""
    path = tmp_path_factory.mktemp("pictures") / "sliding.png"
    return imread(pictures.mask_picture(Sliding(window=4), 32, path))


@pytest.mark.slow_except("self_extend")
@pytest.mark.parametrize("name", NAMES)
def test_weights_times_values_are_attention_under_every_pattern(name):
    kind = Pattern.get_choice_class(name)
    pattern = kind(**kind.examples[0])
    rows, length, heads, size = 1, 96, 4, 8
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((rows, length, n, size), np.float32) for n in (heads, 2, 2))
    rotation = Linear(theta=100.0, factor=2.0).rotation(size, length)
    at = np.arange(length)[None]
    chosen = {"pattern": pattern, "rotation": rotation}

    @jax.jit
    def both(q, k, v):
        metadata = AttentionMetadata(at, at, rotation=rotation, implementation="xla")
        return (
            pictures.attention_weights(q, k, **chosen),
            pictures.attention_weights(q, k, **chosen, queries=5),
            pattern.attend(q, k, v, metadata),
        )

    weights, last, expected = map(np.asarray, both(q, k, v))
    assert weights.shape == (rows, length, heads, length)
    by_weight = np.einsum("btns,bsnh->btnh", weights, np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(by_weight, expected, atol=2e-5)
    np.testing.assert_allclose(last, weights[:, -5:], atol=2e-6)


def first_layer(lm, tokens):
    """Attention weights [N, T, T] of the first layer, by a softmax over all keys at once."""
    params, count = lm.params, len(tokens)
    layer = jax.tree.map(np.asarray, params["layers_0"])
    x = np.asarray(params["embed"]["embedding"])[np.asarray(tokens)]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + lm.config.norm_epsilon)
    x = x * layer["attention_norm"]["scale"]
    angles = np.arange(count)[:, None] * np.asarray(lm.rotation(count + 1).inv_freq)
    turn = np.exp(1j * angles)[:, None]  # of channels i and i + H/2 as one complex number

    def heads(name):
        y = np.einsum("td,dnh->tnh", x, layer["attention"][name]["kernel"])
        real, imaginary = np.split(y, 2, axis=-1)
        return (real + 1j * imaginary) * turn

    q, k = heads("query"), np.repeat(heads("key"), 2, axis=1)
    logits = np.einsum("qnh,knh->nqk", q, k.conj()).real / np.sqrt(lm.config.head_dim)
    logits = np.where(np.tri(count, dtype=bool), logits, -np.inf)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def test_weights_of_an_answer_equal_a_softmax_by_hand(lm):
    prompt, answer = ids(0, 20), "abcd"
    found = pictures.answer_attention(lm, prompt, answer=answer, layers=(0, -1))
    assert found.layers == (0, 1) and found.tokens == list(answer) and found.prompt == 20
    assert found.weights.shape == (2, 4, 4, 23)
    expected = first_layer(lm, [*prompt, *lm.tokenizer.encode(answer)[:-1]])[:, -4:]
    np.testing.assert_allclose(found.weights[0], expected, atol=1e-5)
    assert not np.allclose(found.weights[0], found.weights[1], atol=1e-2)


@pytest.mark.slow
def test_without_an_answer_the_model_writes_one(lm):
    found = pictures.answer_attention(lm, ids(1, 30), max_new_tokens=3)
    assert found.answer == lm.generate([ids(1, 30)], Sampling(max_new_tokens=3))[0]


def test_an_answer_is_looked_at_under_the_method_of_the_model_and_drawn(lm, tmp_path):
    near = lm.with_method(pattern=Sliding(window=8), rope=Linear(factor=2.0))
    path = tmp_path / "a.png"
    found = pictures.attention_picture(near, ids(1, 30), path, answer="abc", head=2)
    behind = np.arange(found.weights.shape[-1])
    for row in range(len(found.tokens)):
        seen = (behind > found.prompt + row - 1 - 8) & (behind <= found.prompt + row - 1)
        assert (found.weights[:, :, row, ~seen] == 0).all()
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    assert imread(path)[..., :3].std() > 0.05 and path.with_suffix(".svg").exists()


def test_masks_equal_their_definitions():
    order = np.arange(24)
    apart = order[:, None] - order[None]
    seen, distance = pictures.mask_of(Sliding(window=5), 24)
    np.testing.assert_array_equal(seen[0], (apart >= 0) & (apart < 5))
    np.testing.assert_array_equal(distance[0][seen[0]], apart[seen[0]])
    assert np.isnan(distance[0][~seen[0]]).all()
    # Self-Extend (arXiv 2401.01325): beyond the window floor(q/g) - floor(k/g) + w - w/g.
    seen, distance = pictures.mask_of(SelfExtend(window=8, group=4), 24)
    far = order[:, None] // 4 - order[None] // 4 + 8 - 8 // 4
    expected = np.where(apart < 8, apart, far)
    np.testing.assert_array_equal(seen[0], apart >= 0)
    np.testing.assert_array_equal(distance[0][seen[0]], expected[seen[0]])


@pytest.mark.slow
def test_landmarks_are_not_read_and_weigh_the_blocks_before_them(tmp_path):
    order = np.arange(16)
    apart, ordinary = order[:, None] - order[None], order % 4 != 3
    seen, distance = pictures.mask_of(Landmark(block=4, top_k=None), 16)
    np.testing.assert_array_equal(seen[0], (apart >= 0) & ordinary)
    np.testing.assert_array_equal(distance[0][seen[0]], apart[seen[0]])
    # Eight tokens at once; of the two blocks in the cache a query reads the best by its landmark.
    pattern = Landmark(block=4, top_k=1, train_length=16)
    seen, distance = pictures.mask_of(pattern, 16, heads=2, seed=3)
    q, k = 0.1 * np.random.default_rng(3).standard_normal((2, 1, 16, 2, 16)).astype(np.float32)
    marks = np.einsum("qnh,bnh->nqb", q[0], k[0, 3::4])
    for head, query in np.ndindex(2, 16):
        start = query // 8 * 8
        expected = (order >= start) & (order <= query) & ordinary
        if start:
            best = marks[head, query, : start // 4].argmax()
            expected |= (order // 4 == best) & ordinary
        np.testing.assert_array_equal(seen[head, query], expected)
        assert np.isnan(distance[head, query, :start]).all()
        own = expected & (order >= start)
        np.testing.assert_array_equal(distance[head, query, own], (query - order)[own])
    image = imread(pictures.mask_picture(pattern, 16, tmp_path / "a.png", heads=2, seed=3))
    grey = (np.ptp(image[..., :3], axis=-1) < 0.01) & (abs(image[..., 0] - 0.585) < 0.02)
    assert grey.sum() > 2000  # what was retrieved


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_mask_of_every_pattern_is_drawn(name, tmp_path):
    kind = Pattern.get_choice_class(name)
    for index, fields in enumerate(kind.examples):
        path = pictures.mask_picture(kind(**fields), 48, tmp_path / f"{index}.png", heads=2)
        image = imread(path)[..., :3]
        colourful = (np.ptp(image, axis=-1) > 0.1).sum()
        assert colourful > 10_000 and path.with_suffix(".svg").exists()


def test_heads_that_see_different_keys_get_panels_of_their_own(sliding_picture, tmp_path):
    pattern = ShiftedSparse(group=8)
    seen, _ = pictures.mask_of(pattern, 32, heads=4)
    assert (seen[0] == seen[1]).all() and (seen[0] != seen[2]).any()
    one = sliding_picture
    two = imread(pictures.mask_picture(pattern, 32, tmp_path / "b.png", heads=4))
    assert two.shape[1] > 1.4 * one.shape[1] and one[..., :3].std() > 0.05


def test_a_picture_of_a_rope_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "rope.png"
    assert command.main(["rope", "--head_dim=16", f"--out={out}"]) == 0
    assert imread(out)[..., :3].std() > 0.02
    assert str(out) in capsys.readouterr().out


def test_the_positions_that_training_rows_visit(tmp_path, monkeypatch):
    ropes = E2LLM(theta=1e4, original_length=64), Linear(theta=1e4, factor=4.0)
    options = {"length": 16, "rows": 200, "head_dim": 8}
    pi = pictures.trained_positions(PlainPositions(), ropes[1], **options)
    np.testing.assert_allclose(pi, np.broadcast_to(np.arange(16) / 4, pi.shape), rtol=1e-6)
    e2 = pictures.trained_positions(E2Positions(max_scale=8), ropes[0], **options)
    assert 60 < e2.max() < 64 and len(np.unique(e2[:, 5])) > 100
    monkeypatch.chdir(tmp_path)
    assert command.main(["positions", "--length=16", "--trained=64", "--rows=20"]) == 0
    assert (tmp_path / "positions.png").stat().st_size > 1000
    with pytest.raises(InputError, match="methods: give at least one"):
        pictures.positions_picture({}, "none.png")


def test_the_mask_of_a_layer_is_drawn(sliding_picture, tmp_path):
    layers = "--layers=[{repeat: 2}, {pattern: {type: sliding, window: 4}}]"
    out = tmp_path / "a.png"
    assert command.main(["mask", layers, "--layer=5", "--length=32", f"--out={out}"]) == 0
    np.testing.assert_array_equal(imread(out), sliding_picture)


def test_the_attention_command_draws_dense_attention_weights(tmp_path, monkeypatch, capsys):
    drawn, imshow = [], Axes.imshow

    def noted(axes, values, **options):
        drawn.append((axes, np.asarray(values)))
        return imshow(axes, values, **options)

    monkeypatch.setattr(Axes, "imshow", noted)
    out, text = tmp_path / "a.png", tmp_path / "prompt.txt"
    text.write_text("The key is 7. What is the key?")
    words = ["--model.preset=tiny", f"--prompt_file={text}", "--answer=abc", "--layers=[0]"]
    assert command.main(["attention", *words, "--head=1", f"--out={out}"]) == 0
    said = capsys.readouterr().out
    assert "answer: 'abc'" in said and str(out) in said
    lm = LanguageModel.load(ModelSection(preset="tiny"))
    tokens = [*lm.encode(text.read_text()), *lm.tokenizer.encode("abc")[:-1]]
    expected = first_layer(lm, tokens)[1, -3:]
    ((axes, shown),) = drawn
    np.testing.assert_allclose(shown, expected, atol=1e-5)
    # In the picture: every cell has the colour of the root of its share of the largest.
    image = imread(out)[..., :3]
    inch = image.shape[0] / axes.figure.get_figheight()
    rows, columns = np.indices(expected.shape)
    centres = np.stack([columns + 0.5, rows + 0.5], -1).reshape(-1, 2)
    x, y = (axes.transData.transform(centres) * inch / axes.figure.dpi).T.astype(int)
    found = image[image.shape[0] - 1 - y, x].reshape(*expected.shape, 3)
    colours = colormaps["cividis"](np.sqrt(expected / expected.max()))[..., :3]
    away = columns != len(lm.encode(text.read_text()))  # not beneath the line before the answer
    np.testing.assert_allclose(found[away], colours[away], atol=0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["masks"], "masks is no picture; did you mean mask?"),
        (["mask", "--length=1"], "length=1 must be a whole number of at least 2"),
        (["mask", "--length=100000"], "heads=1 x length=100000 squared must be at most"),
        (["mask", "--heads=0"], "heads=0 must be a whole number"),
        (["mask", "--seed=-1"], "seed=-1 must be a whole number"),
        (["mask", "--layer=1000000000"], "layer=1000000000 must be a whole number"),
        (["rope", "--head_dim=0"], "head_dim=0 must be a whole number"),
        (["rope", "--length=-1"], "length=-1 must be a whole number"),
        (["rope", "--trained=0"], "trained=0 must be a whole number"),
        (["rope", "--ropes=[{name: a, rope: {type: none}}]"], "a rotates nothing"),
        (["positions", "--length=0"], "length=0 must be a whole number"),
        (["positions", "--rows=1000000000"], "rows=1000000000 x length=4096 must be at most"),
        (["attention", "--model.preset=tiny"], "give either --prompt=TEXT or --prompt_file=FILE"),
        (["attention", "--prompt_file=absent.txt"], "prompt_file=absent.txt is no file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_wavelengths_are_full_turns_of_the_frequencies(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: lines.extend(
        line.get_ydata() for line in figure.axes[0].get_lines()
    ))  # fmt: skip
    rope = Linear(theta=100.0, factor=4.0)
    pictures.rope_picture({"a $ b_": rope}, tmp_path / "a.png", head_dim=8, length=64, theta=100.0)
    np.testing.assert_allclose(lines[0], 2 * np.pi / rope.frequencies(8, 64)[0], rtol=1e-6)


def test_agreement_is_the_product_of_equal_queries_and_keys_after_rotation(tmp_path, monkeypatch):
    curves = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: curves.extend(
        line.get_xydata().T for line in figure.axes[2].get_lines()
    ))  # fmt: skip
    rope = Yarn(theta=100.0, factor=4.0, original_length=16)  # which also scales cos and sin
    pictures.rope_picture({"yarn": rope}, tmp_path / "a.png", head_dim=8, length=64, theta=100.0)
    distances, agreement = curves[0]
    frequencies, scale = rope.frequencies(8, 64)
    assert scale > 1.1
    # Pairs of channels as complex numbers, all equal in a key of length 1 at position 0.
    key = scale * np.full(4, 4**-0.5)
    queries = key * np.exp(1j * np.outer(distances, frequencies))
    np.testing.assert_allclose(agreement, (queries * key).sum(-1).real, atol=1e-5)


def test_a_prompt_file_that_is_not_utf_8_is_named(tmp_path, capsys):
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    assert command.main(["attention", f"--prompt_file={tmp_path / 'prompt.txt'}"]) == 2
    assert "prompt.txt is not UTF-8" in capsys.readouterr().err


def test_layers_and_heads_that_are_not_there_raise_input_error(lm):
    with pytest.raises(InputError, match="layers: 2 must be from -2 to 1"):
        pictures.answer_attention(lm, [5, 6], answer="a", layers=(2,))
    with pytest.raises(InputError, match="landmark reads a prompt piece by piece"):
        pictures.answer_attention(lm.with_method(pattern=Landmark(token=3)), [5, 6], answer="a")
    found = pictures.AnswerAttention("a", ["a"], 1, (0,), np.zeros((1, 2, 1, 1)))
    with pytest.raises(InputError, match="head=2 must be from 0 to 1"):
        pictures.draw_attention(found, "never.png", head=2)


def test_a_picture_of_a_table_has_its_blocks(tmp_path):
    table = tables.from_mask(causal() & window(8), queries=64, keys=64, q_block=8, k_block=8)
    labels = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Axes, "set_xlabel", lambda self, text, **style: labels.append(text))
        file = pictures.table_picture({"near": table, "again": table}, tmp_path / "table.png")
    assert file.is_file() and file.with_suffix(".svg").is_file()
    # The diagonal, and the block before: a window of 8 begins in it for all queries but the last.
    assert labels == ["keys: 15 blocks of 8 x 8, 0 whole"] * 2
    with pytest.raises(InputError, match="give at least one"):
        pictures.table_picture({}, tmp_path / "none.png")


def test_pictures_replace_pictures_and_no_other_files(tmp_path, capsys):
    out, words = tmp_path / "a.png", ["mask", "--pattern.type=streaming", "--length=40"]
    for _ in range(2):
        assert command.main([*words, f"--out={out}"]) == 0
        assert imread(out)[..., :3].std() > 0.02 and str(out) in capsys.readouterr().out
    for name, ending in (("thesis.txt", "must end with .png"), ("b.png", "is no picture of lcjax")):
        (tmp_path / name).write_text("mine")
        assert command.main([*words, f"--out={tmp_path / name}"]) == 2
        assert ending in capsys.readouterr().err and (tmp_path / name).read_text() == "mine"
    (tmp_path / "c.svg").write_text("mine")
    assert command.main([*words, f"--out={tmp_path / 'c.png'}"]) == 2
    assert not (tmp_path / "c.png").exists() and (tmp_path / "c.svg").read_text() == "mine"


def test_recall_is_the_share_of_full_attention_that_a_pattern_keeps(lm):
    text = ids(0, 60)
    whole = pictures.attention_recall(lm, text, queries=8)
    np.testing.assert_allclose(whole.mass, 1, rtol=1e-6)
    np.testing.assert_array_equal(whole.keys, 1)
    narrow = lm.with_method(pattern=Sliding(window=15))
    some = pictures.attention_recall(narrow, text, queries=8)
    np.testing.assert_allclose(some.keys[0], np.mean(15 / np.arange(53, 61)), rtol=1e-6)

    def record(layer, q, k, pattern, metadata):
        return rotate_qk(q, k, metadata)

    q, k = (np.asarray(x)[0] for x in watch(narrow, text, record)[0])
    logits = np.einsum("tnh,snh->nts", q, np.repeat(k, q.shape[1] // k.shape[1], 1))
    logits = logits * q.shape[2] ** -0.5 + np.where(np.tri(60), 0, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    near = np.tri(60) * np.tri(60, k=14).T
    np.testing.assert_allclose(some.mass[0], (weights * near).sum(-1)[:, -8:].mean(1), rtol=1e-4)
    with pytest.raises(InputError, match="has 5 tokens; give more than queries=8"):
        pictures.attention_recall(lm, text[:5], queries=8)


def test_the_command_prints_the_recall_of_layers(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text("a text of some words " * 10)
    words = ["--model.preset=tiny", "--model.pattern.type=moba", "--model.pattern.block=8"]
    words += ["--model.pattern.top_k=2", f"--text_file={file}", "--tokens=80", "--queries=4"]
    assert command.main(["recall", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 + 1 and lines[-1].split()[0] == "all"
    assert command.main(["recall", "--model.preset=tiny"]) == 2
    assert "give --text_file" in capsys.readouterr().err
