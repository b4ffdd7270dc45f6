"""Weights against attention itself and against a softmax by hand; masks against definitions."""

import jax
import numpy as np
import pytest
from matplotlib.image import imread
from tiny_lm import ids, sharper

from lcjax import LanguageModel, pictures
from lcjax.attention import Landmark, Pattern, SelfExtend, ShiftedSparse, Sliding, attend
from lcjax.build import ModelSection
from lcjax.errors import InputError
from lcjax.inference.sampling import Sampling
from lcjax.pictures import command
from lcjax.rope import Linear

pytestmark = pytest.mark.usefixtures("compiled_quickly")
QUICK = ("self_extend",)
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(Pattern.get_known_choices())
    if name not in (*QUICK, "landmark")
]


@pytest.fixture(scope="module")
def lm():
    return sharper(LanguageModel.load(ModelSection(preset="tiny")))


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
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
        places = {"q_positions": at, "k_positions": at, "implementation": "xla"}
        return (
            pictures.attention_weights(q, k, **chosen),
            pictures.attention_weights(q, k, **chosen, queries=5),
            attend(q, k, v, **chosen, **places),
        )

    weights, last, expected = map(np.asarray, both(q, k, v))
    assert weights.shape == (rows, length, heads, length)
    by_weight = np.einsum("btns,bsnh->btnh", weights, np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(by_weight, expected, atol=2e-5)
    np.testing.assert_allclose(last, weights[:, -5:], atol=2e-6)


def test_weights_of_an_answer_equal_a_softmax_by_hand(lm):
    prompt, answer = ids(0, 20), "abcd"
    found = pictures.answer_attention(lm, prompt, answer=answer, layers=(0, -1))
    assert found.layers == (0, 1) and found.tokens == list(answer) and found.prompt == 20
    assert found.weights.shape == (2, 4, 4, 23)
    tokens, params = np.asarray([*prompt, *lm.tokenizer.encode(answer)[:-1]]), lm.params
    layer = jax.tree.map(np.asarray, params["layers_0"])
    x = np.asarray(params["embed"]["embedding"])[tokens]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + lm.config.norm_epsilon)
    x = x * layer["attention_norm"]["scale"]
    angles = np.arange(23)[:, None] * np.asarray(lm.rotation(24).inv_freq)
    turn = np.exp(1j * angles)[:, None]  # of channels i and i + H/2 as one complex number

    def heads(name):
        y = np.einsum("td,dnh->tnh", x, layer["attention"][name]["kernel"])
        real, imaginary = np.split(y, 2, axis=-1)
        return (real + 1j * imaginary) * turn

    q, k = heads("query"), np.repeat(heads("key"), 2, axis=1)
    logits = np.einsum("qnh,knh->nqk", q, k.conj()).real / np.sqrt(lm.config.head_dim)
    logits = np.where(np.tri(23, dtype=bool), logits, -np.inf)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    expected = (shares / shares.sum(-1, keepdims=True))[:, -4:]
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


def test_masks_are_what_their_definitions_say():
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


def test_heads_that_see_different_keys_get_panels_of_their_own(tmp_path):
    pattern = ShiftedSparse(group=8)
    seen, _ = pictures.mask_of(pattern, 32, heads=4)
    assert (seen[0] == seen[1]).all() and (seen[0] != seen[2]).any()
    one = imread(pictures.mask_picture(Sliding(window=4), 32, tmp_path / "a.png"))
    two = imread(pictures.mask_picture(pattern, 32, tmp_path / "b.png", heads=4))
    assert two.shape[1] > 1.4 * one.shape[1] and one[..., :3].std() > 0.05


def test_pictures_from_the_command_line(tmp_path, capsys):
    for words in (["mask", "--pattern.type=streaming", "--length=40"], ["rope", "--head_dim=16"]):
        out = tmp_path / f"{words[0]}.png"
        assert command.main([*words, f"--out={out}"]) == 0
        assert imread(out)[..., :3].std() > 0.02
        assert str(out) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["masks"], "masks is no picture; did you mean mask?"),
        (["mask", "--length=1"], "length=1 must be at least 2"),
        (["mask", "--pattern.type=landmark"], "its weights are not drawn"),
        (["attention", "--model.preset=tiny"], "give either --prompt=TEXT or --prompt_file=FILE"),
        (["attention", "--prompt_file=absent.txt"], "prompt_file=absent.txt is no file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_layers_and_heads_that_are_not_there_are_refused(lm):
    with pytest.raises(InputError, match="layers: 2 is none of the model's 2"):
        pictures.answer_attention(lm, [5, 6], answer="a", layers=(2,))
    with pytest.raises(InputError, match="landmark weighs blocks"):
        pictures.weights.check_pattern(Landmark())
    found = pictures.AnswerAttention("a", ["a"], 1, (0,), np.zeros((1, 2, 1, 1)))
    with pytest.raises(InputError, match="head=2 is none of the model's 2"):
        pictures.draw_attention(found, "never.png", head=2)
