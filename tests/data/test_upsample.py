"""Length up-sampling: the authors' choices, budgets, modes, the exact position, bad settings."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_support import Bytes, assert_same, make_texts, write_jsonl

from lcjax import config as configs
from lcjax.data import DataConfig, Share, TextSource, Upsample, documents, make_loader
from lcjax.data.corpus import open_corpus
from lcjax.data.streams import order
from lcjax.data.upsample import SLIMPAJAMA, Selection
from lcjax.errors import InputError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rope.json").read_text())
LABEL = "meta.redpajama_set_name"


@pytest.fixture(scope="module")
def golden():
    return GOLDEN["per_source_upsampling"]


def slimpajama(folder, golden, files=4):
    """The golden documents as SlimPajama stores them: frames of zstd with JSON lines."""
    pa = pytest.importorskip("pyarrow")
    lines = []
    pairs = zip(golden["docs_chars"], golden["docs_source"], strict=True)
    for i, (characters, source) in enumerate(pairs):
        text = (f"{i} " + "x" * characters)[:characters]
        lines.append(
            json.dumps(
                {"text": text, "meta": {"redpajama_set_name": golden["source_names"][source]}}
            )
        )
    size = -(-len(lines) // files)
    for k in range(files):
        data = "".join(line + "\n" for line in lines[k * size : (k + 1) * size]).encode()
        (folder / f"{k}.jsonl.zst").write_bytes(pa.compress(data, codec="zstd", asbytes=True))
    return str(folder)


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    return slimpajama(tmp_path_factory.mktemp("slimpajama"), golden)


def small(folder, **more):
    upsample = Upsample(**{"tokens": 60_000} | more)
    return TextSource(folder, label_field=LABEL, upsample=upsample)


def names(source, **settings):
    stream = open_corpus(source)
    return [document.name for document, _, _ in stream.read(**settings)]


def test_the_authors_program_chooses_the_same_documents(golden):
    upsample = Upsample(tokens=golden["total_tokens"], ratio=golden["down_sample_ratio"])
    assert {share.label: share.share for share in SLIMPAJAMA} == golden["mix"]
    selection, kept = Selection(upsample), []
    pairs = zip(golden["docs_chars"], golden["docs_source"], strict=True)
    for i, (characters, source) in enumerate(pairs):
        if selection.keep(characters, golden["source_names"][source], "here"):
            kept.append(i)
        if selection.full:
            break
    assert kept == golden["kept"] and i == golden["stop_index"]
    for label, tokens in golden["tokens_per_source"].items():
        assert selection.used[label] == pytest.approx(tokens, rel=1e-12)


def test_reading_slimpajamas_files_chooses_them_too(golden, folder):
    source = small(folder, tokens=golden["total_tokens"])
    data = DataConfig(sources=[source])
    texts = [text for _, text in documents(data)]
    assert [int(text.split()[0]) for text in texts] == [
        i for i in golden["kept"] if golden["docs_chars"][i] > 5
    ]


def test_an_epoch_ends_as_soon_as_all_budgets_are_full_and_goes_over_by_one_document_each(golden):
    upsample = Upsample(tokens=golden["total_tokens"])
    selection = Selection(upsample)
    rng, longest = np.random.default_rng(0), 0.0
    for _ in range(100_000):
        label = golden["source_names"][rng.integers(7)]
        before, characters = selection.used[label], int(rng.integers(1, 40_000))
        kept = selection.keep(characters, label, "here")
        longest = max(longest, characters / 3.68)
        assert not kept or before <= upsample.budgets()[label]
        if selection.full:
            break
    assert selection.full
    for label, budget in upsample.budgets().items():
        assert budget <= selection.used[label] <= budget + longest


def test_the_position_of_a_selection_is_exact(golden):
    upsample = Upsample(tokens=golden["total_tokens"])
    pairs = list(zip(golden["docs_chars"], golden["docs_source"], strict=True))

    def run(selection, documents):
        return [selection.keep(c, golden["source_names"][s], "here") for c, s in documents]

    whole = Selection(upsample)
    first, state = run(whole, pairs[:200]), None
    state = json.loads(json.dumps(whole.get_state()))
    rest = run(whole, pairs[200:])
    assert any(first) and any(rest)
    resumed = Selection(upsample)
    resumed.set_state(state)
    assert run(resumed, pairs[200:]) == rest


def test_the_files_come_in_random_order_and_every_epoch_in_its_own(golden, folder):
    source = TextSource(folder, stream=True)
    plain = names(source, shuffle=False, repeat=1)
    count = len(golden["docs_chars"])
    assert len(plain) == count and plain == sorted(plain, key=lambda n: (n[0], int(n[12:])))
    two = names(source, shuffle=True, repeat=2, seed=1)
    assert sorted(two[:count]) == sorted(two[count:]) == sorted(plain)
    assert two[:count] != two[count:] and two[:count] != plain
    other = names(source, shuffle=True, repeat=1, seed=2)
    assert other != two[:count]
    # one file after the other
    assert len(list(itertools.groupby(name[0] for name in two[:count]))) == 4


def test_the_order_of_files_and_documents_is_the_same_for_ever():
    assert order(7, 5, 0).tolist() == [1, 4, 3, 5, 6, 2, 0]
    assert order(7, 5, 1).tolist() != order(7, 5, 0).tolist() != order(7, 0, 5).tolist()


@pytest.mark.parametrize("mode", ["per_source", "global", None])
@pytest.mark.parametrize("pack", ["concat", "best_fit"])
def test_resuming_anywhere_continues_bit_for_bit(mode, pack, tmp_path):
    for i in range(4):
        write_jsonl(tmp_path / f"{i}.jsonl", make_texts(30, seed=i))
    shares = [Share(str(i), 0.25) for i in range(4)] if mode == "per_source" else []
    chosen = mode and Upsample(mode=mode, tokens=500, below=15, ratio=0.4, shares=shares)
    source = TextSource(str(tmp_path), stream=True, upsample=chosen)
    config = DataConfig(sources=[source], length=64, pack=pack, packing_bins=3, repeat=2)
    config = replace(config, holdout=0.1)
    loader, states, batches = make_loader(config, Bytes(), 4), [], []
    states.append(loader.get_state())
    for batch in loader:
        batches.append(batch)
        states.append(loader.get_state())
    assert len(batches) > 8
    for step in range(0, len(states), 3):
        resumed = make_loader(config, Bytes(), 4)
        resumed.set_state(json.loads(json.dumps(states[step])))
        assert_same(batches[step:], list(resumed))


def test_a_stream_holds_out_the_documents_that_an_index_holds_out(folder):
    indexed, stream = TextSource(folder), TextSource(folder, stream=True)
    for side in ("train", "validation"):
        a, b = (
            sorted(name for name, _ in documents(DataConfig(sources=[s], holdout=0.2), side))
            for s in (indexed, stream)
        )
        assert a == b
    # the choice by length is one for training
    held = DataConfig(sources=[small(folder)], holdout=0.2)
    assert [n for n, _ in documents(held, "validation")] == [
        n for n, _ in documents(replace(held, sources=[stream]), "validation")
    ]


def test_the_other_modes_equal_their_definitions(golden, folder):
    everything = names(small(folder, mode="none", tokens=10**9), shuffle=False, repeat=1)
    assert len(everything) == len(golden["docs_chars"])
    short = [c / 3.68 < 4096 for c in golden["docs_chars"]]
    picked = names(small(folder, mode="global", tokens=10**9), shuffle=False, repeat=1)
    random, wanted = np.random.RandomState(15213), []
    for name, is_short in zip(everything, short, strict=True):
        if not is_short or random.random_sample() <= 0.1:
            wanted.append(name)
    assert picked == wanted
    stopped = names(small(folder, mode="none", tokens=1000), shuffle=False, repeat=1)
    lengths = np.cumsum(golden["docs_chars"]) / 3.68
    assert len(stopped) == np.argmax(lengths > 1000) + 1
    budgets = Upsample(mode="code_arxiv_book", tokens=1000).budgets()
    assert sum(budgets.values()) == pytest.approx(1000)
    assert budgets["RedPajamaBook"] == pytest.approx(1000 * 0.6 / 2.66556592)


def test_labels_may_be_folders_and_shares_ones_own(tmp_path):
    for folder, count in (("books", 3), ("web", 30)):
        (tmp_path / folder).mkdir()
        for i in range(count):
            (tmp_path / folder / f"{i:02d}.txt").write_text("a" * 368)
    shares = [Share("books", 1.0), Share("web", 1.0)]
    upsample = Upsample(tokens=500, ratio=1.0, shares=shares, normalise=True)
    found = names(TextSource(str(tmp_path), upsample=upsample), shuffle=False, repeat=1)
    # 250 tokens each: three documents of 100
    assert found == [f"books/{i:02d}.txt" for i in range(3)] + [
        f"web/{i:02d}.txt" for i in range(3)
    ]
    none = replace(upsample, shares=[Share("books", 1.0), Share("web", 0.0)], normalise=False)
    found = names(TextSource(str(tmp_path), upsample=none), shuffle=False, repeat=1)
    assert found == [f"books/{i:02d}.txt" for i in range(3)]


def test_the_section_is_read_from_yaml_and_the_command_line(tmp_path):
    file = tmp_path / "data.yaml"
    file.write_text(
        "sources:\n- path: a\n  label_field: meta.redpajama_set_name\n"
        "  upsample: {tokens: 1_000_000_000, shares: [{label: a, share: 1}]}\n"
    )
    data = configs.parse(DataConfig, ["--config", str(file), "--sources.0.upsample.ratio=0.2"])
    assert data.sources[0].upsample == Upsample(tokens=10**9, ratio=0.2, shares=[Share("a", 1.0)])


def test_labels_that_are_not_there_or_not_known_are_named(folder):
    with pytest.raises(InputError, match=r"has no field 'meta.kind'; it .*label_field"):
        make_loader(
            DataConfig(sources=[replace(small(folder), label_field="meta.kind")]), Bytes(), 1
        )
    with pytest.raises(InputError, match=r"has the label '0', which upsample.shares lack; .*Book"):
        make_loader(DataConfig(sources=[replace(small(folder), label_field="")]), Bytes(), 1)


def test_a_source_that_upsampling_empties_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    source = TextSource(str(tmp_path), upsample=Upsample(mode="global", ratio=0.0))
    with pytest.raises(InputError, match=r"gives no document in an epoch with upsample.mode=glob"):
        make_loader(DataConfig(sources=[source]), Bytes(), 1)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"shares": [Share("a", 0.5), Share("b", 0.4)]}, "sum to 0.9, not to 1: .*normalise=true"),
        ({"shares": [Share("a", 0.5), Share("a", 0.5)]}, "name a label twice: a, a"),
        ({"shares": [Share("a", -1.0), Share("b", 2.0)]}, "must be 0 or more"),
        ({"shares": [Share("a", 1.0)], "mode": "global"}, "global does not use shares"),
    ],
)
def test_settings_out_of_range_raise_input_error(fields, match):
    with pytest.raises(InputError, match=match):
        Upsample(**fields)
