"""Generation: equal to the full forward pass, in batches, in chunks, for every rotation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope_examples import rope_examples
from scipy.special import log_softmax
from tiny_lm import generated

from lcjax.attention import DualChunk, LMInfinite, SelfExtend, Streaming
from lcjax.checkpoints import ByteTokenizer
from lcjax.errors import InputError
from lcjax.generation.generate import Piece
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling, join_pieces, pick
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import random_params, with_learned_rope
from lcjax.rope import Default, Yarn

ROPES = rope_examples(theta=1e4, length=16)
PLAIN, YARN = Default(theta=1e4), Yarn(theta=1e4, factor=4.0, original_length=16)


@pytest.fixture(scope="module")
def params():
    params = random_params(preset("tiny"), 0)
    # Sharper than at initialisation, so that the greedy choice does not hang on rounding.
    return jax.tree.map(lambda x: np.asarray(x) * (3 if x.ndim > 1 else 1), params)


def _model(params, rope=PLAIN, **changes):
    config = preset("tiny").replace(rope=rope, **changes)
    return LanguageModel(Decoder(config), with_learned_rope(params, config, 0), ByteTokenizer())


def _ids(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@functools.partial(jax.jit, static_argnums=0)
def _hidden(model, params, tokens, options):
    output = model.apply({"params": params}, tokens, **options)
    return output.hidden, output.cache


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens, rotation):
    hidden = model.apply({"params": params}, tokens, rotation=rotation).hidden
    return model.apply({"params": params}, hidden, method="logits")


def _greedy_by_full_forward(lm, prompt, count, *, exact):
    """Reads everything anew for every token: slow, and right by construction."""
    ids, total = list(prompt), len(prompt) + count
    for step in range(count):
        rotation = lm.rotation(len(prompt) + step if exact else total)
        tokens = np.zeros((1, total), np.int32)
        tokens[0, : len(ids)] = ids
        logits = np.array(_logits(lm.model, lm.params, tokens, rotation)[0, len(ids) - 1])
        logits[list(lm.tokenizer.eos_ids)] = -np.inf  # all samplings have min_new_tokens=count
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROPES)
def test_greedy_text_equals_reading_everything_anew_past_the_trained_length(params, name):
    lm, prompt = _model(params, ROPES[name]), _ids(1, 29)
    sampling = Sampling(max_new_tokens=9, min_new_tokens=9)
    got = generated(lm, [prompt], sampling)
    assert got == [_greedy_by_full_forward(lm, prompt, 9, exact=False)]


@pytest.mark.parametrize("name", [name for name in ROPES if ROPES[name].depends_on_length])
def test_unrotated_keys_follow_a_rotation_that_changes_while_decoding(params, name):
    # One layer: what deeper layers kept of the past was computed at the length of that moment.
    first = params | {"layers": jax.tree.map(lambda leaf: leaf[:1], params["layers"])}
    lm, prompt = _model(first, ROPES[name], num_layers=1), _ids(1, 29)
    sampling = Sampling(max_new_tokens=9, min_new_tokens=9)
    got = generated(lm, [prompt], sampling, exact=True)
    assert got == [_greedy_by_full_forward(lm, prompt, 9, exact=True)]
    changed = {str(lm.rotation(29 + step).inv_freq) for step in range(9)}
    assert len(changed) > 1


def test_unrotated_keys_follow_logits_that_grow_while_decoding(params):
    first = params | {"layers": jax.tree.map(lambda leaf: leaf[:1], params["layers"])}
    pattern = DualChunk(chunk=12, local=4, train_length=16)
    lm, prompt = _model(first, num_layers=1, pattern=pattern), _ids(1, 29)
    got = generated(lm, [prompt], Sampling(max_new_tokens=9, min_new_tokens=9), exact=True)
    assert got == [_greedy_by_full_forward(lm, prompt, 9, exact=True)]
    assert lm.rotation(30).scale > lm.rotation(29).scale > lm.rotation(16).scale == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "slots"),
    [
        (Streaming(sinks=3, recent=20), 64),
        (LMInfinite(window=12, sinks=4), 64),  # a rolling cache of unrotated keys
        (SelfExtend(window=16, group=4, scale_base=20), 192),  # a full one
        (DualChunk(chunk=24, local=8, train_length=40), 192),  # logits grow with the request
    ],
    ids=lambda value: type(value).__name__,
)
def test_generation_with_patterns_equals_full_recomputation(params, pattern, slots, monkeypatch):
    made, create = [], cache_lib.create
    monkeypatch.setattr(
        cache_lib, "create", lambda *a, **k: made.append(create(*a, **k)) or made[-1]
    )
    lm = _model(params).with_method(pattern=pattern)
    prompts, sampling = [_ids(1, 90), _ids(2, 121)], Sampling(max_new_tokens=6, min_new_tokens=6)
    got = generated(lm, prompts, sampling, prefill_chunk=32)
    assert got == [_greedy_by_full_forward(lm, prompt, 6, exact=False) for prompt in prompts]
    # The text of 128 tokens is read through as many slots as the pattern can see.
    assert [cache.capacity for cache in made] == [slots]
    assert made[0].kinds[0].rotated != pattern.moves_keys


@pytest.mark.slow
def test_a_prompt_read_in_chunks_gives_the_same_text(params):
    lm, prompt = _model(params), _ids(5, 150)
    sampling = Sampling(max_new_tokens=6, min_new_tokens=6)
    whole = generated(lm, [prompt], sampling)
    assert generated(lm, [prompt], sampling, prefill_chunk=64) == whole
    assert generated(lm, [prompt], sampling, prefill_chunk=40) == whole


def test_sampling_is_seeded_and_obeys_temperature_and_top_p(params):
    lm, prompt = _model(params), _ids(6, 12)
    greedy = generated(lm, [prompt], Sampling(max_new_tokens=16, min_new_tokens=16))
    settings = {"max_new_tokens": 16, "min_new_tokens": 16, "temperature": 1.5}
    first = generated(lm, [prompt], Sampling(**settings, seed=1))
    assert first == generated(lm, [prompt], Sampling(**settings, seed=1))
    assert first != generated(lm, [prompt], Sampling(**settings, seed=2))
    # A nucleus of almost nothing holds the most probable token only, as does the best one token.
    assert generated(lm, [prompt], Sampling(**settings, top_p=1e-6)) == greedy
    assert generated(lm, [prompt], Sampling(**settings, top_k=1)) == greedy
    assert generated(lm, [prompt], Sampling(**settings, seed=1, top_k=10**6)) == first


def test_a_text_with_its_own_seed_draws_the_same_whatever_is_beside_it():
    logits = jax.random.normal(jax.random.key(0), (4, 50))
    drawn = Sampling(temperature=1.0, seed=(5, 6, 7))
    eos = jnp.array([0])
    together = pick(logits, drawn.key(4), 2, eos, drawn)  # the fourth row fills up a mesh
    for row, seed in enumerate(drawn.seed):
        alone = dataclasses.replace(drawn, seed=(seed,))
        assert pick(logits[row : row + 1], alone.key(1), 2, eos, alone)[0] == together[row]
    steps = [pick(logits, drawn.key(4), step, eos, drawn).tolist() for step in range(3)]
    assert len(set(map(tuple, steps))) == 3
    with pytest.raises(InputError, match="3 numbers for 2 prompts"):
        drawn.check_texts(2)


def test_top_k_keeps_the_most_probable_tokens_and_the_keep_top_p_counts_only_these():
    from lcjax.generation.sampling import _keep_top_k, pick

    logits = jnp.array([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 5.0, 1.0]])
    is_kept = np.isfinite(np.asarray(_keep_top_k(logits, 2)))
    # What is as probable as the last one stays.
    np.testing.assert_array_equal(is_kept, [[False, True, False, True], [True, True, True, False]])
    logits, eos = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]])), jnp.array([], jnp.int32)

    def drawn(**options):
        sampling = Sampling(temperature=1.0, top_p=0.5, **options)
        keys = jax.random.split(jax.random.key(0), 40)
        return {int(pick(logits, key, 0, eos, sampling)[0]) for key in keys}

    # The first has 0.4 of all tokens and does not reach 0.5; of the best two it has 0.57.
    assert drawn() == {0, 1}
    assert drawn(top_k=2) == {0}


def test_keep_top_p_keeps_the_smallest_set_that_reaches_top_p():
    from lcjax.generation.sampling import _keep_top_p

    probability = np.array([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]])
    is_kept = np.isfinite(jax.jit(_keep_top_p)(np.log(probability), 0.8))
    np.testing.assert_array_equal(is_kept, [[False, True, True, True], [True, False, False, False]])
    # A token that reaches top_p exactly is the last one.
    exact = jax.jit(_keep_top_p)(np.log(np.float32([[0.5, 0.25, 0.25]])), 0.5)
    np.testing.assert_array_equal(np.isfinite(exact), [[True, False, False]])


class _Scripted:
    """A tokenizer over single characters; "." is EOS, and capitals are special tokens: `<S>`."""

    eos_ids = (ord("."),)

    def decode(self, ids, *, skip_special=False):
        texts = {i: f"<{chr(i)}>" for i in ids if chr(i) == "." or chr(i).isupper()}
        return "".join("" if skip_special and i in texts else texts.get(i, chr(i)) for i in ids)


def _row(text, **sampling):
    from lcjax.generation.generate import RowText

    row = RowText(0, _Scripted(), Sampling(**sampling))
    pieces = []
    for letter in text:
        pieces.append(row.add(ord(letter)))
        if row.finish:
            break
    pieces = [piece for piece in pieces if piece]
    return "".join(piece.text for piece in pieces), row.finish, pieces


def test_text_ends_before_a_stop_string_and_never_shows_its_beginning():
    text, finish, pieces = _row("abcdxyzefg", stop=("xyz",))
    assert (text, finish) == ("abcd", "stop")
    assert all("x" not in piece.text for piece in pieces)
    # A beginning of a stop string that goes on differently is shown after all.
    assert _row("abxyc.", stop=("xyz",))[:2] == ("abxyc", "stop")
    assert _row("abxy.", stop=("xyz",))[:2] == ("abxy", "stop")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abSc", "<S>", "ab"),
        ("abSc", "b<S>", "a"),  # begins with text
        ("abSc", "<S>c", "ab"),  # ends with text
        ("abSSc", "<S><S>", "ab"),
        ("abSc", "<", "ab"),  # a part of a special token, as in transformers
        ("abSc", "bc", "a"),  # the shown text
        ("ab.c", "b<.>", "a"),  # EOS
        ("ab.c", "<.>", "ab"),
        ("abTc.", "<S>", "abc"),
    ],
)
def test_a_stop_string_may_be_or_contain_a_special_token(text, stop, expected):
    actual, finish, _ = _row(text, stop=("zz", stop))
    assert (actual, finish) == (expected, "stop")


def test_pieces_end_before_the_first_stop_string_of_the_whole_text():
    random = np.random.default_rng(0)

    def draw(size):
        return "".join(random.choice(list("abST."), size, p=[0.3, 0.3, 0.2, 0.15, 0.05]))

    decode = _Scripted().decode
    for _ in range(300):
        text = draw(12).rstrip(".") + "."
        parts = [decode(map(ord, draw(4))) for _ in range(2)]
        stops = tuple(part[random.integers(2) : random.integers(3, 9)] or "b" for part in parts)
        for end in range(1, text.index(".") + 2):
            ids = [ord(letter) for letter in text[:end]]
            shown = decode(ids, skip_special=True)
            starts = [
                len(decode(ids[:n], skip_special=True))
                for stop in stops
                for n in range(end)
                if decode(ids)[len(decode(ids[:n])) :].find(stop) in range(len(decode(ids[n:n+1])))
            ] + [shown.index(stop) for stop in stops if stop in shown]  # fmt: skip
            if starts or ids[-1] == ord("."):
                break
        assert _row(text, stop=stops)[0] == shown[: min(starts, default=None)], (text, stops)


def test_the_end_of_text_token_and_the_limit_finish_a_row():
    assert _row("ab.cd")[:2] == ("ab", "stop")
    assert _row("abcdef", max_new_tokens=3)[:2] == ("abc", "length")


def test_generated_text_has_its_token_ids_and_finish_reason():
    other = [Piece(1, "x", (24,)), Piece(1, "", (25,), "length")]
    first, second = join_pieces([other[0], *_row("ab.cd")[2], other[1]], 2)
    assert (first, first.ids, first.finish) == ("ab", (97, 98, 46), "stop")
    assert (second, second.ids, second.finish) == ("x", (24, 25), "length")


def test_bad_requests_raise_input_error(params):
    lm = _model(params)
    for prompts in ([[]], []):
        with pytest.raises(InputError, match="non-empty list of non-empty token lists"):
            lm.stream(prompts)
    for prompts in ([1, 2], [[[1], [2]]], [[[1], [2, 3]]]):
        with pytest.raises(InputError, match=r"prompts\[0\]=.* must be a list of token ids"):
            lm.stream(prompts)
    for token in (-1, lm.config.vocab_size, 2**70, 1.5, True, "a"):
        with pytest.raises(InputError, match=rf"prompts\[1\]: token={token!r} must"):
            lm.stream([[1], [2, token]])
    for messages in ([], ["hello"], [{"content": "no role"}]):
        with pytest.raises(InputError, match="must be a question, or a list of messages"):
            lm.chat(messages)
    with pytest.raises(InputError, match="must be a list"):
        lm.generate("a text instead of a list of them")
    for settings, message in (
        ({"min_new_tokens": 999}, "min_new_tokens=999 must lie between 0 and max_new_tokens=128"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"seed": 2**32}, "seed=4294967296 must be .* at most 4294967295"),
    ):
        with pytest.raises(InputError, match=message) as error:
            Sampling(**settings)
        assert "\n" not in str(error.value)
    for chunk in (0, -64, 1.5, "many", True):
        with pytest.raises(InputError, match=f"prefill_chunk={chunk!r} must be"):
            lm.stream([[1, 2]], prefill_chunk=chunk)
    assert Piece(0, "", ()).finish is None


def test_prompts_of_near_lengths_share_one_compiled_prefill(params):
    from lcjax.generation.session import _step_in_place

    lm = _model(params)
    generated(lm, [_ids(11, 270)], Sampling(max_new_tokens=1))
    before = _step_in_place._cache_size()
    for length in (330, 384):
        generated(lm, [_ids(11, length)], Sampling(max_new_tokens=1))
    assert _step_in_place._cache_size() == before


def test_a_chunk_longer_than_the_prompt_and_its_cache_reads_it_at_once(params):
    lm, prompt = _model(params), _ids(5, 50)
    sampling = Sampling(max_new_tokens=4, min_new_tokens=4)
    want = generated(lm, [prompt], sampling)
    assert generated(lm, [prompt], sampling, prefill_chunk=10**9) == want


def test_scores_are_those_of_the_full_logits_and_padding_counts_nothing(params):
    lm = _model(params, YARN)
    tokens = np.array([_ids(7, 40), _ids(8, 40)])
    model = Decoder(lm.config.replace(scan_layers=False))
    logits = _logits(model, lm.params, tokens, None)
    want = -np.take_along_axis(log_softmax(logits, -1)[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    got = lm.nll(tokens, lengths=np.array([40, 25]))
    np.testing.assert_allclose(got[0, 1:], want[0], atol=1e-4)
    np.testing.assert_allclose(got[1, 1:25], want[1, :24], atol=1e-4)
    assert not got[:, 0].any() and not got[1, 25:].any()
    np.testing.assert_allclose(lm.nll(tokens, first=30)[:, 30:], want[:, 29:], atol=1e-4)


def test_a_method_is_exchanged_without_touching_the_weights(params):
    lm = _model(params)
    tokens = np.array([_ids(9, 64)])
    other = lm.with_method(rope=Yarn(factor=8.0))
    assert other.config.rope == Yarn(theta=1e4, factor=8.0, original_length=128)
    assert other.params is lm.params
    assert np.abs(other.nll(tokens) - lm.nll(tokens)).max() > 1e-3
    np.testing.assert_array_equal(other.with_method(rope=PLAIN).nll(tokens), lm.nll(tokens))


def test_requests_that_differ_in_seed_stop_length_or_temperature_share_one_compiled_choice(params):
    from lcjax.generation.sampling import _draw

    lm, prompt = _model(params), _ids(6, 12)
    generated(lm, [prompt], Sampling(max_new_tokens=3, temperature=0.7))
    before = _draw._cache_size()
    generated(lm, [prompt], Sampling(max_new_tokens=4, temperature=0.7, seed=5, stop=("zzz",)))
    generated(lm, [prompt], Sampling(max_new_tokens=3, temperature=1.25))
    assert _draw._cache_size() == before
    generated(lm, [prompt], Sampling(max_new_tokens=3, temperature=1, top_p=0.9))
    nucleus = _draw._cache_size()
    generated(lm, [prompt], Sampling(max_new_tokens=3, temperature=2.5, top_p=0.4))
    assert _draw._cache_size() == nucleus <= before + 1


def test_fractional_positions_survive_in_a_cache_of_unrotated_keys(params):
    lm = _model(params, YARN)
    model, places = lm.model, np.arange(20, dtype=np.float32)[None] / 3
    tokens, rotation = np.array([_ids(10, 20)]), lm.rotation(64)
    options = {"positions": places, "rotation": rotation}
    want, _ = _hidden(model, lm.params, tokens, options)
    cache = cache_lib.create(model.config, 1, 64, rotated=False)
    for part in (slice(0, 10), slice(10, 20)):
        options = {"positions": places[:, part], "rotation": rotation, "cache": cache}
        got, cache = _hidden(model, lm.params, tokens[:, part], options)
    np.testing.assert_allclose(got, want[:, 10:], atol=1e-4)


@pytest.mark.parametrize("temperature", [1e-38, 1e-20, 1e39])
@pytest.mark.parametrize("top_p", [1.0, 1e-50])
def test_extreme_settings_pick_what_their_limit_does(temperature, top_p):
    logits = jnp.array([[20.0, 21.0, 40.0, 22.0, 60.0]])
    settings = Sampling(2, 2, temperature=temperature, top_p=top_p)
    keys = (dataclasses.replace(settings, seed=seed).key(1) for seed in range(12))
    tokens = {int(pick(logits, key, 0, jnp.array([4]), settings)[0]) for key in keys}
    assert 4 not in tokens
    if temperature < 1:
        assert tokens == {2}
    else:
        assert (len(tokens) == 1) == (top_p < 1)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1e-38}, {"temperature": 1e-300}, {"temperature": 1.0, "top_p": 1e-50}],
)
def test_a_temperature_or_top_p_near_0_picks_the_most_probable_token(settings):
    logits, eos = jnp.array([[20.0, 21.0, 40.0, 22.0]]), jnp.array([], jnp.int32)
    sampling = Sampling(**settings)
    assert pick(logits, sampling.key(1), 0, eos, sampling).tolist() == [2]


def test_a_huge_temperature_draws_no_masked_token():
    logits, eos = jnp.array([[20.0, 21.0, -jnp.inf, 22.0]] * 50), jnp.array([0], jnp.int32)
    sampling = Sampling(temperature=1e39, min_new_tokens=1)
    assert set(pick(logits, sampling.key(50), 0, eos, sampling).tolist()) == {1, 3}


def test_prompts_with_a_seed_each_keep_it():
    sampling = Sampling(temperature=1, seed=(1, 2))
    assert sampling.with_seeds([[1], [2]]) == sampling
