"""What tests of memories share: golden cases, reading and training with a context, models."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file
from tiny_lm import text

from lcjax.checkpoints.build import ModelSection, build
from lcjax.checkpoints.weights import TensorInfo
from lcjax.memory import SharedLlmSection
from lcjax.models import Decoder
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.rope.positions import PlainPositions
from lcjax.training.objective import language_model
from lcjax.training.train_config import trainable
from lcjax.tree import flatten, split

TOLERANCE = 2e-5  # absolute, of float32 logits in exact products


class Golden:
    """Cases of a released code: what it was given and gave, and its weights."""

    def __init__(self, name: str):
        self._folder = Path(__file__).parent.parent / "golden" / name

    def document(self, case: str) -> dict:
        return json.loads((self._folder / f"{case}.json").read_text())

    def arrays(self, case: str) -> dict[str, np.ndarray]:
        with np.load(self._folder / f"{case}.io.npz") as data:
            return dict(data)

    def weights(self, case: str) -> "Stored":
        return Stored(case, load_file(self._folder / f"{case}.weights.safetensors"))


class Stored:
    """Named tensors in memory, as `read_params` wants them."""

    def __init__(self, name: str, arrays: dict[str, np.ndarray]):
        self.path, self._arrays = name, arrays
        self.tensors = {k: TensorInfo(v.shape, str(v.dtype)) for k, v in arrays.items()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._arrays[name][start:stop]


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, tokens, memory, options):
    """Logits [B, T, V], and the cache if there is one."""
    output = model.apply({"params": params}, tokens, memory=memory, **options)
    hidden, cache = output.hidden, output.cache
    return model.apply({"params": params}, hidden, method="logits"), cache


def assert_close(found, wanted, tolerance=TOLERANCE):
    np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0)


SECTION = SharedLlmSection(layers=1, chunk=16, ratios=(4, 2, 1), output_share=1.0)


@functools.cache
def tiny_model(section):
    """A random model that listens to its context, and its parameters."""
    model, params, _ = build(ModelSection(preset="tiny", memory=section))
    return model, params


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens, chunks, mask, at):
    options = {}
    if model.config.memory.query_dependent:
        options["query"] = model.apply({"params": params}, tokens, at, method="embed_query")
    memory = model.apply({"params": params}, chunks, mask, method="encode", **options)
    hidden = model.apply({"params": params}, tokens, memory=memory).hidden
    return model.apply({"params": params}, hidden, method="logits")


def by_hand(lm, tokens, chunks, at):
    """Logits [B, T, V] of `tokens` [B, T], with all that is beside them in one program.

    `chunks` are lists of token ids for each row; what asks them is the token `at` [B].
    """
    size = max(len(chunk) for row in chunks for chunk in row)
    filled = np.zeros((len(chunks), max(map(len, chunks)), size), np.int32)
    mask = np.zeros(filled.shape, bool)
    for row, own in enumerate(chunks):
        for i, chunk in enumerate(own):
            filled[row, i, : len(chunk)], mask[row, i, : len(chunk)] = chunk, True
    model = Decoder(lm.config.replace(remat="none", scan_layers=False))
    return np.array(_logits(model, lm.params, np.asarray(tokens), filled, mask, np.asarray(at)))


def assert_reads(lm, tokens, context, chunks, *, tolerance=5e-5, first=1):
    """Losses of three texts beside `context` are those beside its `chunks`; the second has none."""
    found, plain = lm.nll(tokens, context=context, first=first), lm.nll(tokens, first=first)
    logits = by_hand(lm, tokens, chunks, [first - 1] * len(tokens))
    log_p = np.asarray(jax.nn.log_softmax(logits[:, first - 1 : -1]))
    wanted = -np.take_along_axis(log_p, tokens[:, first:, None], -1)[..., 0]
    np.testing.assert_allclose(found[:, first:], wanted, atol=tolerance)
    np.testing.assert_array_equal(found[1], plain[1])
    assert np.abs(found - plain).max(1)[[0, 2]].min() > 0.05, "it does listen"


def assert_most_probable(lm, prompts, found, chunks):
    """Each token `found` behind a prompt is the most probable one without a cache as well."""
    new, ends = len(found[0]), np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), ends.max() + new), np.int32)
    for row, end in enumerate(ends):
        tokens[row, : end + new] = prompts[row] + found[row]
    logits = by_hand(lm, tokens, chunks, ends - 1)
    logits[..., list(lm.tokenizer.eos_ids)] = -np.inf
    for row, end in enumerate(ends):
        assert found[row] == logits[row, end - 1 : end + new - 1].argmax(-1).tolist()


def batch(rows, chunk=16, length=16):
    """Random texts beside two chunks each; every other row's first chunk begins with padding."""
    mask = np.ones((rows, 2, chunk), bool)
    mask[::2, 0, :5] = False
    return {
        "tokens": text(2, rows, length),
        "targets": text(3, rows, length),
        "segments": np.ones((rows, length), np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
        "weights": np.ones((rows, length), np.float32),
        "chunks": text(4, rows, 2, chunk),
        "chunk_mask": mask,
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(config, mesh, trained, frozen, own, key):
    objective = language_model(config, PlainPositions(), mesh=mesh)

    def loss(trained):
        total, count, _ = objective(trained, frozen, own, key)
        return total / count

    return jax.value_and_grad(loss)(trained)


def gradients(config, params, rules, own, mesh=None, *, seed=0):
    """The loss of the batch `own`, and its gradients for what `rules` train."""
    trained, frozen = split(params, trainable(flatten(params), rules))
    return _gradients(config, mesh, trained, frozen, own, jax.random.key(seed))


def assert_trained_alike_on(sizes, section, rules, own):
    """A mesh changes neither the loss nor its gradients."""

    def on(mesh):
        model, params, _ = build(ModelSection(preset="tiny", memory=section), mesh)
        return gradients(model.config, params, rules, own, mesh)

    (loss, grads), (found, other) = on(None), on(make_mesh(Mesh(*sizes)))
    assert abs(found - loss) < 1e-5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), other, grads)
