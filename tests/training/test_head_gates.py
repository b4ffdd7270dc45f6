"""Gates of key heads: what they mix, and a run that trains them for `duo_attention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_support import losses, tiny

from lcjax.attention import AttentionMetadata, Causal, DuoAttention, Sliding
from lcjax.attention.base import Features
from lcjax.attention.head_gates import HEAD_GATE, GatedHeads, HeadGates
from lcjax.errors import InputError
from lcjax.models import cache as cache_lib
from lcjax.models import preset
from lcjax.training import run
from lcjax.training.train_config import TrainSection

TINY = preset("tiny")


def test_gates_mix_full_attention_and_that_to_the_first_and_last_tokens():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 20, n, 8)), jnp.float32) for n in (4, 2, 2))
    places = jnp.arange(20)[None]
    features = Features({}, {}, {HEAD_GATE: jnp.array([1.5, 0.25])})
    metadata = AttentionMetadata(places, places, features=features)
    out = GatedHeads(sinks=2, recent=3).attend(q, k, v, metadata)
    full = Causal().attend(q, k, v, metadata)
    i, j = np.arange(20)[:, None], np.arange(20)
    visible = (j <= i) & ((j < 2) | (i - j < 3))
    logits = jnp.einsum("TH,SH->TS", q[0, :, 2], k[0, :, 1]) / np.sqrt(8)
    streamed = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf)) @ v[0, :, 1]
    np.testing.assert_allclose(out[:, :, :2], full[:, :, :2], atol=1e-6)
    np.testing.assert_allclose(out[0, :, 2], 0.25 * full[0, :, 2] + 0.75 * streamed, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TrainSection(head_gates=HeadGates(), trainable=("all",)), "train.trainable"),
        (lambda: HeadGates().in_model(TINY.replace(pattern=Sliding(8))), "pattern.type=causal"),
    ],
)
def test_other_trainings_beside_gates_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.usefixtures("compiled_once")
def test_a_run_lowers_its_loss_and_writes_scores_that_duo_attention_reads(tmp_path, corpus):
    folder = tmp_path / "run"
    gates = HeadGates(sinks=2, recent=6)
    run(tiny(folder, corpus, steps=10, head_gates=gates, lr=0.05, warmup_steps=0))
    found = losses(folder)
    assert found[max(found)] < found[min(found)]
    method = DuoAttention(str(folder / "model" / "heads.json"), sinks=4, recent=28)
    scores = method.scores(2)
    assert scores.shape == (2, 2) and (scores < 1).all() and len(np.unique(scores)) > 1
    assert method.streams(2).sum() == 2
    cache = cache_lib.create(TINY.replace(cache=method), 1, 256)
    assert all(kind.evicts for kind in cache.kinds)
