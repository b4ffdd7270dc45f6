"""A language model on several devices, its layers, and what it computes only once."""

import contextlib
import dataclasses
import functools
import gc
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from argument_types import check_other_types
from scipy.special import log_softmax
from tiny_lm import sharper

from lcjax.attention import InfLLM, Landmark, LMInfinite
from lcjax.checkpoints import ByteTokenizer, save_hf
from lcjax.checkpoints.build import ModelSection, Settings
from lcjax.errors import InputError
from lcjax.generation import inference_model, scoring
from lcjax.generation.conversation import Conversation
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.replug import Replug
from lcjax.generation.sampling import Sampling
from lcjax.memory import Beacon, CepeSection
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import random_params
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.retrieval import DecoderEncoder
from lcjax.retrieval.reader import RetrievalReader
from lcjax.rope import E2LLM, NTK, Clex, DynamicNTK, Linear, Yarn

SECTION = ModelSection(preset="tiny", rope=DynamicNTK(factor=2.0))


def _ids(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.fixture(scope="module")
def alone():
    return sharper(LanguageModel.load(SECTION))


@pytest.fixture(scope="module")
def spread():
    return sharper(LanguageModel.load(SECTION, mesh=Mesh(data=2, fsdp=2, tensor=2)))


@pytest.fixture(scope="module")
def beside():
    return LanguageModel.load(ModelSection(preset="tiny", memory=CepeSection("tiny-encoder")))


@pytest.mark.slow
def test_weights_and_caches_are_split_over_the_mesh(spread):
    kernel = spread.params["layers_0"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    config, mesh = spread.model.config, spread.model.mesh
    cache = cache_lib.create(config, 4, 64, mesh=mesh)
    keys = cache.layers[1]["keys"]
    assert keys.addressable_shards[0].data.shape == (1, config.num_kv_heads // 2, 64, 16)
    after = jax.jit(lambda cache: cache_lib.keep_layout(cache, mesh))(cache)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), cache, after)
    )


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_scores_on_a_mesh_equal_those_of_one_device_for_any_number_of_rows(alone, spread, rows):
    tokens = np.array([_ids(row, 150) for row in range(rows)])
    lengths = np.arange(150, 150 - 20 * rows, -20)
    want = alone.nll(tokens, first=4, lengths=lengths)
    got = spread.nll(tokens, first=4, lengths=lengths)
    assert got.shape == want.shape == (rows, 150)
    np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_on_a_mesh_equals_that_of_one_device(alone, spread, temperature):
    prompts = [_ids(1, 70), _ids(2, 9), _ids(3, 130)]
    sampling = Sampling(
        max_new_tokens=8, min_new_tokens=8, temperature=temperature, top_p=0.9, seed=3
    )
    got, want = ([[], [], []] for _ in range(2))
    for lm, rows in ((spread, got), (alone, want)):
        for piece in lm.stream(prompts, sampling, prefill_chunk=64):
            rows[piece.row] += piece.ids
    assert got == want and all(len(row) == 8 for row in got)


def test_a_mesh_of_jax_and_the_shape_of_one_are_the_same(spread):
    own = LanguageModel.load(SECTION, mesh=make_mesh(Mesh(data=2, fsdp=2, tensor=2)))
    assert own.model == spread.model
    assert own.with_method(rope=Yarn(factor=2.0)).model.mesh == own.model.mesh
    with pytest.raises(InputError, match="must divide"):
        LanguageModel.load(SECTION, mesh=Mesh(data=3))


def test_loading_leaves_one_copy_of_the_weights_in_memory(monkeypatch):
    copied = pytest.fail
    monkeypatch.setattr(
        inference_model, "unstack_layers", lambda *_: copied("all layers were copied")
    )
    gc.collect()
    before = sum(leaf.nbytes for leaf in jax.live_arrays())
    lm = LanguageModel.load(ModelSection(preset="tiny"))
    held = sum(leaf.nbytes for leaf in jax.live_arrays()) - before
    assert held == sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))


def test_layers_are_separate_on_every_backend(monkeypatch):
    model, params = Decoder(preset("tiny")), random_params(preset("tiny"), 0)
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        for lm in (
            LanguageModel.load(ModelSection(preset="tiny", dtype="float32")),
            LanguageModel(model, params, ByteTokenizer()),
        ):
            assert not lm.model.config.scan_layers and "layers_1" in lm.params
        assert "layers" in params  # the caller's own tree


@pytest.mark.slow
def test_a_rotation_is_computed_once_for_a_method_and_length(monkeypatch):
    lm, calls = LanguageModel.load(ModelSection(preset="tiny", rope=Clex(max_factor=4))), []
    compute = Clex.rotation

    def counted(self, head_dim, length, params=None):
        calls.append((self.max_factor, length))
        return compute(self, head_dim, length, params)

    monkeypatch.setattr(Clex, "rotation", counted)
    tokens = np.array([_ids(1, 60)])
    first = lm.nll(tokens)
    np.testing.assert_array_equal(lm.nll(tokens), first)
    assert calls == [(4, 60)]
    lm.nll(tokens[:, :50])
    assert calls == [(4, 60), (4, 50)]
    other = lm.with_method(rope=Clex(max_factor=3))
    other.nll(tokens), other.nll(tokens), lm.nll(tokens)
    assert calls == [(4, 60), (4, 50), (3, 60)]
    lm.with_method(length=300).nll(tokens)
    assert calls[3:] == [(4, 300)]


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "fp8"), ("param_dtype", "int8"), ("remat", "half"), ("remat", None)],
)
def test_numerics_that_do_not_exist_raise_input_error_before_anything_is_read(key, value):
    for make in (ModelSection, lambda **kw: LanguageModel.load("absent", **kw)):
        with pytest.raises(InputError, match=rf"model\.{key}={value!r} must be one of") as error:
            make(**{key: value})
        assert "\n" not in str(error.value)


def test_settings_change_a_section_that_is_loaded():
    lm = LanguageModel.load(SECTION, rope=Yarn(factor=4.0))
    assert lm.config.rope == Yarn(theta=1e4, factor=4.0, original_length=128)


def _exact_scores(lm, tokens, first):
    """Scores by the logits of the text alone, at its own length."""
    log_p = np.asarray(_log_p(lm.model, lm.params, tokens, lm.rotation(tokens.shape[1])))
    return -np.take_along_axis(log_p[:, first - 1 : -1], tokens[:, first:, None], -1)[..., 0]


@functools.partial(jax.jit, static_argnums=0)
def _log_p(model, params, tokens, rotation):
    hidden = model.apply({"params": params}, tokens, rotation=rotation).hidden
    return jax.nn.log_softmax(model.apply({"params": params}, hidden, method="logits"))


@pytest.mark.parametrize(("length", "first"), [(150, 1), (150, 149), (147, 20), (2, 1)])
def test_scores_do_not_depend_on_the_size_of_the_program_that_makes_them(alone, length, first):
    # The rope follows the length: its frequencies are those of 150 tokens, not of what fills it.
    tokens = np.array([_ids(1, length), _ids(2, length)])
    got = alone.nll(tokens, first=first)
    np.testing.assert_allclose(got[:, first:], _exact_scores(alone, tokens, first), atol=1e-4)
    assert not got[:, :first].any()


@pytest.mark.slow_except("cepe", "mesh")  # the mesh has the rope dynamic_ntk, too
@pytest.mark.parametrize("method", ["dynamic_ntk", "inf_llm", "cepe", "mesh"])
def test_logits_give_the_scores_of_each_row_alone(alone, spread, beside, method):
    pattern = InfLLM(window=6, sinks=2, block=3, top_k=2, representatives=2, chunk=8)
    lm, options = {"mesh": spread, "cepe": beside}.get(method, alone), {}
    if method == "inf_llm":
        lm = alone.with_method(pattern=pattern)
    if method == "cepe":
        options = {"context": lm.encode_contexts([[_ids(9, 30)], [], [_ids(8, 5)]])}
    tokens, lengths = np.array([_ids(row, 150) for row in range(3)]), np.array([150, 40, 0])
    logits = lm.logits(tokens, lengths=lengths, **options)
    assert logits.dtype == np.float32 and logits.shape == (3, 150, lm.config.vocab_size)
    log_p = np.take_along_axis(log_softmax(logits, -1)[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    nll = lm.nll(tokens, lengths=lengths, **options)[:, 1:]
    np.testing.assert_allclose(np.where(nll != 0, -log_p, 0), nll, atol=5e-5)
    assert logits[1, 39].any() and not logits[1, 40:].any() and not logits[2].any()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["predict", "skip"])
def test_logits_of_a_model_with_landmarks_give_its_scores(alone, loss):
    pattern = Landmark(block=8, top_k=1, train_length=32, token=258, loss=loss)
    lm, tokens = alone.with_method(pattern=pattern), np.array([_ids(1, 64), _ids(2, 64)])
    lengths = np.array([63, 28])  # blocks of seven tokens: both end with a full one
    logits = lm.logits(tokens[:, :63], lengths=lengths)
    assert logits.dtype == np.float32 and logits.shape == (2, 63, lm.config.vocab_size)
    log_p = np.take_along_axis(log_softmax(logits, -1), tokens[:, 1:, None], -1)[..., 0]
    nll = lm.nll(tokens, lengths=lengths + 1)[:, 1:]  # reads all but the last token
    np.testing.assert_allclose(-log_p[0], nll[0], atol=5e-5)
    np.testing.assert_allclose(-log_p[1, :28], nll[1, :28], atol=5e-5)
    assert logits[1, 27].any() and not logits[1, 28:].any()


@pytest.mark.parametrize(
    "rope", [Yarn(factor=4.0), Linear(factor=2.0), NTK(alpha=4.0), DynamicNTK(factor=2.0), E2LLM()]
)
def test_a_method_that_needs_no_training_is_saved_with_the_model(alone, tmp_path, rope):
    tokens = np.array([_ids(1, 200)])
    lm = alone.with_method(rope=rope)
    with contextlib.nullcontext() if lm.config.rope.hf_limit is None else pytest.warns():
        assert lm.save(tmp_path / "model") == tmp_path / "model"
    again = LanguageModel.load(str(tmp_path / "model"))
    np.testing.assert_allclose(again.nll(tokens), lm.nll(tokens), atol=5e-5)
    assert again.tokenizer.encode("a cat") == lm.tokenizer.encode("a cat")
    with pytest.raises(InputError, match="exists and is not empty"):
        lm.save(tmp_path / "model")
    assert lm.save(tmp_path / "model", dtype="bfloat16", overwrite=True).is_dir()


def test_a_saved_model_is_compared_with_its_checksums(alone, tmp_path):
    folder = alone.save(tmp_path / "model")
    tokens = np.array([_ids(1, 200)])
    np.testing.assert_allclose(LanguageModel.load(folder).nll(tokens), alone.nll(tokens), atol=5e-5)
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"generation_config\.json is not as it was written"):
        LanguageModel.load(folder)


def test_what_no_config_describes_is_not_saved(alone, tmp_path):
    for method, message in (
        ({"pattern": LMInfinite(window=6, sinks=2)}, "cannot be exported"),
        ({"length": 100}, "length=100 of with_method cannot be saved"),
    ):
        with pytest.raises(InputError, match=message):
            alone.with_method(**method).save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_texts_of_near_lengths_share_one_program_and_so_do_starts(alone):
    alone.nll(np.array([_ids(1, 160)]), first=40)
    before = scoring._score_rows._cache_size()
    for length, first in ((160, 42), (155, 38), (146, 30)):
        alone.nll(np.array([_ids(1, length)]), first=first)
    assert scoring._score_rows._cache_size() == before


@pytest.mark.slow
def test_a_text_as_long_as_a_table_of_positions_is_scored():
    lm = LanguageModel.load(ModelSection(preset="tiny", position="learned"))
    tokens = np.array([_ids(1, lm.config.max_length - 1)])
    np.testing.assert_allclose(lm.nll(tokens)[:, 1:], _exact_scores(lm, tokens, 1), atol=1e-4)


def test_editors_are_shown_the_fields_of_a_section_as_settings():
    hints = typing.get_type_hints(ModelSection)  # without the limits of the fields
    fields = {field.name: hints[field.name] for field in dataclasses.fields(ModelSection)}
    assert typing.get_type_hints(Settings) == fields


@pytest.mark.parametrize("token", [259, -1, 100_000, 2**40, 1.5])
def test_invalid_token_ids_raise_input_error_in_every_method(alone, beside, token):
    number = rf"token={token!r} must|whole numbers"
    for call in (
        lambda: alone.nll([[1, 2, token]]),
        lambda: alone.generate([[1, token]]),
        lambda: alone.continuations([[1, token]], [[[2]]]),
        lambda: alone.continuations([[1]], [[[2], [3, token]]]),
        lambda: Replug(alone).nll([[1, 2, token]], context=[[]]),
        lambda: Replug(alone).nll([[1, 2]], context=[[[token]]]),
        lambda: Replug(alone).continuations([[1, 2]], [[[token]]], context=[[]]),
        lambda: beside.encode_contexts([[[1, token]]]),
        lambda: Conversation(alone).read([1, token]),
    ):
        with pytest.raises(InputError, match=number) as error:
            call()
        assert "\n" not in str(error.value)


def test_an_argument_of_another_type_is_named_in_one_line(alone, beside):
    sampling = Sampling(max_new_tokens=2)
    load, method = functools.partial(LanguageModel.load, "absent"), alone.with_method
    table, decode = np.zeros((2, 3)), alone.tokenizer.decode
    for call, message in (
        (lambda: method(rope="yarn"), r"rope='yarn' .* pass lcjax\.rope\.Yarn\(factor=\.\.\.\)"),
        (lambda: method(rope="yaarn"), "rope='yaarn' .* did you mean yarn?"),
        (lambda: method(rope={"type": "linear"}), r"pass lcjax\.rope\.Linear\(factor"),
        (lambda: method(rope=Yarn), "pass lcjax.rope.Yarn"),
        (lambda: method(pattern="landmark"), r"pass lcjax\.attention\.Landmark\("),
        (lambda: method(memory="cepe"), r"pass lcjax\.memory\.Cepe\(states=\.\.\., layers="),
        (lambda: beside.with_method(memory=Beacon(chunk=8)), "must be a Cepe, which the weights"),
        (lambda: method(length=-5), "length=-5 must be a whole number of at least 1"),
        (lambda: load(rope="yarn"), r"model\.rope='yarn' .* pass lcjax\.rope\.Yarn"),
        (lambda: load(pattern="lm_infinite"), "pass lcjax.attention.LMInfinite"),
        (lambda: load(memory="cepe"), r"pass lcjax\.memory\.CepeSection\(\)"),
        (lambda: load(roope=1), "roope=1 is no option of LanguageModel.load; did you mean rope"),
        (lambda: load(meshes=1), "did you mean mesh"),
        (lambda: load(seed=-1), "model.seed=-1 must"),
        (lambda: alone.generate(None), "prompts=None must be a list"),
        (lambda: alone.generate(np.int32(3)), "prompts=np.int32.3. must be a list"),
        (lambda: alone.generate([None]), r"prompts\[0\]=None must be a list of token ids"),
        (lambda: alone.generate(["a"], {"seed": 1}), "sampling=.*must be a Sampling"),
        (lambda: alone.generate([5, "a"], sampling), r"prompts\[0\]=5 must be"),
        (lambda: alone.generate(["a\ud800"], sampling), "lone surrogate .* character 1"),
        (lambda: alone.encode(None), "text=None must be a string"),
        (lambda: alone.chat(5), "messages=5 must be a question"),
        (lambda: alone.chat([{"role": "user"}]), "messages=.*must be a question"),
        (lambda: alone.chat([{"role": "user", "content": 5}]), "messages=.*must be a question"),
        (lambda: alone.continuations(None, [[[1]]]), "prompts=None must be a list"),
        (lambda: alone.continuations([[1]], [5]), r"continuations\[0\]=5 must be a list"),
        (lambda: alone.continuations([5], [[[1]]]), r"prompts\[0\]=5 must be a list"),
        (lambda: beside.encode_contexts(None), "context=None must be a list"),
        (lambda: beside.encode_contexts([None]), "a row=None must be a list"),
        (lambda: Replug(alone).generate(None, context=[[]]), "prompts=None must be a list"),
        (lambda: Replug(alone).generate(["a"], context=None), "context=None must be a list"),
        (lambda: Replug(3), "lm is of type int, must be LanguageModel"),
        (lambda: Replug(alone, temperature=(1, 2)), r"temperature=\(1, 2\) must be a number x > 0"),
        (lambda: Replug(alone, marginal=table), "marginal=.* must be one of"),
        (lambda: method(rope=table), "rope=.* must be an instance of Rope"),
        (
            lambda: method(rope={"type": "yarn", "factor": 4}),
            r"rope=.* must be an instance of Rope; pass lcjax\.rope\.Yarn\(factor=4\.0\)$",
        ),
        (
            lambda: method(cache={"type": "snapkv", "ratio": 0.5, "heads": {"type": "adaptive"}}),
            r"SnapKV\(ratio=0\.5, heads=lcjax\.attention\.AdaptiveHeads\(\)\)$",
        ),
        (lambda: method(cache={"type": "snapkv"}), "^model.cache.type=snapkv needs one of tokens"),
        (lambda: alone.generate(["a"], exact=table), "exact=.* must be True or False"),
        (lambda: RetrievalReader(alone, Words(), how=table), "how=.* must be one of input"),
        (lambda: alone.stream(["a"], prefix=[]), "prefix is of type list, must be CachedPrefix"),
        (lambda: alone.stream(["a"], mixture=2), "mixture is of type int, must be Mixture"),
        (lambda: alone.continuations([[1]], [[[1]]], prefix="a"), "prefix is of type str"),
        (lambda: alone.encode(table), "text=.* must be a string"),
        (lambda: alone.encode("a", begins=table), "begins=.* must be True or False"),
        (lambda: alone.save("absent", overwrite=table), "overwrite=.* must be True or False"),
        (lambda: alone.save("absent", dtype=table), "dtype=.* must be one of"),
        (lambda: save_hf("absent", [], alone.config), "params is of type list, must be dict"),
        (lambda: save_hf("absent", {}, []), "config is of type list, must be ModelConfig"),
        (lambda: save_hf("absent", {}, alone.config, progress=3), "progress is of type int"),
        (lambda: decode("34"), "ids must be token ids"),
        (lambda: decode([[3]]), "ids must be token ids"),
        (lambda: decode([-1]), "ids must be token ids"),
        (lambda: decode([3], skip_special=1), "skip_special=1 must be True or False"),
        (lambda: Sampling(top_p=table), "top_p=.* must be a number"),
        (lambda: Mesh(fsdp=table), "mesh.fsdp=.* must be a whole number"),
    ):
        with pytest.raises(InputError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_a_model_is_printed_as_one_line(spread):
    assert repr(spread) == (
        "LanguageModel(0.119M parameters in float32, 2 layers, trained length 128, position=rope,"
        " rope=DynamicNTK, pattern=Causal, 8 devices)"
    )


@pytest.mark.parametrize("shape", [(5,), (2, 5, 3), (1, 2, 5, 64)])
def test_decoder_errors_name_the_expected_token_shape(alone, shape):
    with pytest.raises(InputError, match=r"tokens of shape .* must be token ids \[B, T\]") as error:
        alone.model.apply({"params": alone.params}, jnp.zeros(shape, jnp.int32))
    assert "\n" not in str(error.value)


def test_tokens_and_lengths_that_do_not_fit_raise_input_error(alone):
    tokens = np.ones((2, 8), np.int32)
    for changes, message in (
        ({"tokens": tokens.astype(float)}, "must be token ids, whole numbers in rows"),
        ({"tokens": tokens[0]}, "in rows of one length"),
        ({"tokens": [[1, 2], [3]]}, "in rows of one length"),
        ({"tokens": "some text"}, "in rows of one length"),
        ({"lengths": [8, 9]}, "whole numbers from 0 to the 8 tokens"),
        ({"lengths": [8, -1]}, "whole numbers from 0 to the 8 tokens"),
        ({"lengths": [8.0, 2.0]}, "whole numbers from 0"),
        ({"lengths": [8]}, "must be 2 whole numbers"),
        ({"first": 8}, "first=8 must lie between"),
        ({"first": 1.5}, "first=1.5 must be a whole number"),
    ):
        for nll in (alone.nll, functools.partial(Replug(alone).nll, context=[[], []])):
            with pytest.raises(InputError, match=message) as error:
                nll(**{"tokens": tokens, **changes})
            assert "\n" not in str(error.value)
    # What stands behind a text may be anything: it is not read.
    tokens[1, 5:] = -100
    scores = alone.nll(tokens, lengths=np.array([8, 5]))
    assert np.isfinite(scores).all() and not scores[1, 5:].any()
    assert not alone.nll(tokens, lengths=np.array([8, 0]))[1].any()


def test_the_cache_beside_a_memory_has_no_known_bytes(alone, beside):
    assert beside.cache_bytes(64) is None
    assert alone.cache_bytes(64) == 2 * alone.cache_bytes(32) > 0


def test_arguments_of_other_types_are_input_errors(alone):
    check_other_types(alone.inference_memory, rows=1, length=64)
    check_other_types(alone.cache_bytes, length=64)
    check_other_types(alone.rotation)
    check_other_types(alone.rotations)
    check_other_types(alone.with_shared_prefixes)
    check_other_types(alone.search_contexts, "contexts", query=["a"])
    check_other_types(DecoderEncoder, lm=alone)
    check_other_types(RetrievalReader, lm=alone, retriever=Words())
    for score in (3, None, "x", [1]):
        with pytest.raises(InputError, match="score is of type .* must be Callable"):
            alone.score(score, [[3, 4]])


class Words:
    """A retriever without hits."""

    def search(self, queries, k):
        return [[] for _ in queries]
