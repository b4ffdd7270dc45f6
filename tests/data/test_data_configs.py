"""The data configs that ship: they parse, and say what the papers say."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lcjax import config as configs
from lcjax.data import DataConfig, lengths
from lcjax.data.prepare import PrepareConfig
from lcjax.data.upsample import SLIMPAJAMA
from lcjax.evaluation import reproduce, study
from lcjax.retrieval import BuildConfig, ChunksConfig, WindowsConfig
from lcjax.training.train_config import TrainConfig

FOLDER = Path(__file__).parents[2] / "configs" / "data"


@dataclass(frozen=True)
class Run:
    data: DataConfig = field(default_factory=DataConfig)


@pytest.mark.parametrize("name", ["slimpajama_upsampled", "slimpajama_upsampled_released"])
def test_slimpajama_is_upsampled_as_the_study_prints_it_and_as_its_program_had_it(name):
    prepared = configs.parse(PrepareConfig, ["--config", str(FOLDER / f"{name}.yaml")])
    (source,) = prepared.text_sources()
    assert (source.label_field, prepared.out) == ("meta.redpajama_set_name", f"data/{name}")
    upsample = source.upsample
    assert (upsample.mode, upsample.ratio, upsample.below) == ("per_source", 0.1, 4096)
    # enough for the 961 steps of 32 rows of 32,768 tokens
    assert upsample.tokens >= 961 * 32 * 32768
    assert sum(upsample.budgets().values()) == pytest.approx(upsample.tokens)
    shares = {label: tokens / upsample.tokens for label, tokens in upsample.budgets().items()}
    printed = {  # LCEG, appendix 9.3
        "CommonCrawl": 0.67, "C4": 0.15, "Github": 0.045, "Wikipedia": 0.045, "Book": 0.045,
        "ArXiv": 0.025, "StackExchange": 0.02,
    }  # fmt: skip
    released = {share.label: share.share for share in SLIMPAJAMA}
    printed = {f"RedPajama{label}": share for label, share in printed.items()}
    assert shares == pytest.approx(released if name.endswith("released") else printed)


def test_cepes_rows_are_mixed_two_to_one_by_the_papers_shares(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(f"data: !include {FOLDER / 'cepe_mixture.yaml'}\n")
    data = configs.parse(Run, ["--config", str(run)]).data
    inside = [source for source in data.sources if source.pack == "windows"]
    across = [source for source in data.sources if source.pack is None]
    weights = [sum(source.weight for source in part) for part in (inside, across)]
    assert weights[0] / weights[1] == pytest.approx(2.0)
    assert all(2 * source.stride == data.length == 8192 for source in data.sources)
    assert sorted(s.labels[0] for s in inside) == ["arxiv", "book"] and len(across) == 7
    assert data.decoder_length == data.chunks.tokens == 4096 and not data.document_mask
    assert data.add_bos and data.add_eos
    assert {source.labels[0]: source.weight for source in across} == {
        "arxiv": 0.025, "book": 0.045, "c4": 0.15, "common_crawl": 0.67, "github": 0.045,
        "stackexchange": 0.02, "wikipedia": 0.045,
    }  # fmt: skip


def test_sharedllms_rows_are_cepes_across_documents_but_for_the_books():
    def of(name):
        return configs.parse(TrainConfig, ["--config", str(FOLDER.parent / f"{name}.yaml")]).data

    ours, theirs = of("sharedllm_7b"), of("cepe_7b")
    weights = [source.weight for source in ours.sources]
    across = [source.weight for source in theirs.sources if source.pack is None]
    assert weights == pytest.approx(across)
    assert {source.stride for source in ours.sources} == {4096} and not ours.document_mask
    assert [s.path for s in ours.sources if not s.labels] == ["data/pg19"]
    assert {s.path for s in ours.sources if s.labels} == {"data/redpajama"}
    texts, *chats = of("sharedllm_sft_7b_chat").sources
    assert texts.min_document_tokens == 1200
    shares = of("sharedllm_sft_7b_chat").length_shares
    assert [(part.tokens, part.share) for part in shares] == [
        (2048, 0.47), (4096, 0.29), (6144, 0.08), (8192, 0.16)
    ]  # fmt: skip
    file = str(FOLDER / "sharedllm_lengths.yaml")
    counted = configs.parse(lengths.LengthsConfig, ["--config", file])
    assert counted.data == of("sharedllm_sft_7b_chat")
    assert texts.weight == pytest.approx(7 * sum(chat.weight for chat in chats), rel=0.01)
    ends = [chat.prompt.removeprefix("[INST]{instruction}[/INST]") for chat in chats]
    assert ends == [" ", "\n", "\n\n"]


def test_cepes_retrieval_reads_three_parts_of_redpajama_that_share_no_document():
    def of(kind, name):
        return configs.parse(kind, ["--config", str(FOLDER / f"{name}.yaml")])

    train, test = (of(PrepareConfig, f"redpajama_{name}") for name in ("train", "test"))
    store = of(BuildConfig, "redpajama_store")
    rows, windows = of(ChunksConfig, "retdoc_redpajama"), of(WindowsConfig, "redpajama_retrieved")
    (one,), (two,), (three,) = train.sources, test.sources, store.data.sources
    assert one.path == two.path == three.path  # names, and so hashes, are relative to the path
    ends = [end for source in (two, one, three) for end in source.hashes]
    assert ends == sorted(ends)
    assert (store.chunking.unit, store.chunking.size) == ("tokens", 256)
    encoder = store.encoder
    assert (encoder.path, encoder.pooling, encoder.normalize) == (
        "facebook/contriever", "mean", False
    )  # fmt: skip
    for config, source in ((rows, train), (windows, test)):
        assert config.store == store.out and config.same_document and config.query_tokens == 256
        assert {s.path for s in config.data.sources} == {source.out}
        names = {source.tokenizer, store.chunking.tokenizer, config.tokenizer}
        assert names == {"meta-llama/Llama-2-7b-hf"}
    assert (rows.data.chunks.count, rows.data.chunks.length, rows.data.length) == (16, 256, 4096)
    # The rows are those of the training of CEPE, and are read by the row RetDoc of its table 5.
    cepe = configs.parse(TrainConfig, ["--config", str(FOLDER.parent / "cepe_7b.yaml")])
    assert rows.data.sources == cepe.data.sources
    assert rows.rows >= cepe.train.steps * cepe.train.batch_size
    trained = study.trainings(reproduce.config_at("cepe/table5", "paper"))
    (retdoc,) = (t for name, t in trained.items() if "retdoc" in name)
    assert [s.path for s in retdoc.data.sources] == [rows.out]
    shape = (rows.data.chunks, rows.data.length)
    assert (dataclasses.replace(retdoc.data.chunks, noise=None), retdoc.data.length) == shape
    for table in ("table2", "table5_retrieval"):
        (task,) = reproduce.config_at(f"cepe/{table}", "paper").tasks
        assert (task.path, task.decoder, task.chunk) == (windows.out, windows.data.length, 256)
        assert task.decoder - task.scored == windows.query_tokens
    lengths = reproduce.config_at("cepe/table2", "paper").lengths
    assert windows.data.chunks.count == (max(lengths) - 2048) // 256
    (domains,) = (t for t in reproduce.config_at("cepe/table2", "paper").published
                  if t.source.endswith("k = 50"))  # fmt: skip
    labels = {source.labels[0] for source in windows.data.sources}
    assert {f"domain:{label}" for label in labels} == set(domains.fields)


@pytest.mark.parametrize("recipe", ["ntk_7b_32k", "pi_7b_32k", "yarn_7b_32k"])
def test_recipes_read_rows_of_the_upsampled_corpus_as_lceg_does(recipe):
    data = configs.parse(TrainConfig, ["--config", str(FOLDER.parent / f"{recipe}.yaml")]).data
    assert (data.path, data.length) == ("data/slimpajama_upsampled", 32768)
    assert (data.document_mask, data.add_bos, data.add_eos) == (False, True, False)
