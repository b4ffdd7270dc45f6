"""Tasks of the harness over local files, and a tiny model that both sides can read."""

import json

import jax
import jax.numpy as jnp
import yaml
from tiny_lm import sharper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from lcjax.checkpoints.tokenizer import JsonTokenizer, Specials
from lcjax.generation.language_model import LanguageModel
from lcjax.models import Decoder, preset

CHAT = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
WORDS = ["the", "a", "red", "blue", "dog", "cat", "runs", "sleeps", "in", "on", "under", "house"]
COUNTS = {"word_perplexity": "weighted_perplexity", "bits_per_byte": "bits_per_byte"}
QUESTIONS = [
    {"q": f"Question {n}: the {WORDS[n % 7 + 2]} {WORDS[n % 5]} is", "a": n % 3,
     "choices": [WORDS[(n * 5 + k * 3) % len(WORDS)] * (1 + k) for k in range(3)]}
    for n in range(8)
]  # fmt: skip
TEXTS = [{"text": " ".join(WORDS[(n * k + k) % len(WORDS)] for k in range(40))} for n in range(3)]


def tokenizer() -> JsonTokenizer:
    """Bytes and a few merges, with BOS before a text."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("o", "n")]
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    ends = (made.token_to_id("</s>"),)
    specials = Specials(bos, ends, ends[0], chat_template=CHAT, add_bos=True, max_length=128)
    return JsonTokenizer(made, specials)


def language_model() -> LanguageModel:
    made = tokenizer()
    config = preset("tiny").replace(vocab_size=made.vocab_size, num_layers=2, max_length=128)
    model = Decoder(config)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    return sharper(LanguageModel(model, params, made))


def write_tasks(folder):
    """YAML tasks of every kind, and a group, over JSON files beside them."""
    for name, rows in (("questions", QUESTIONS), ("texts", TEXTS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)

    def task(name, rows, kind, metrics, **more):
        data = {"data_files": {"test": str(folder / f"{rows}.jsonl")}}
        tree = {
            "task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test",
            "output_type": kind, "metadata": {"version": 1},
            "metric_list": [
                {"metric": m, "aggregation": a, "higher_is_better": up} for m, a, up in metrics
            ],
            **more,
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))

    asked = {"doc_to_text": "{{q}}", "doc_to_target": "a", "doc_to_choice": "choices"}
    tag = {"tag": "tiny_tag"}
    shots = {"fewshot_split": "test", "num_fewshot": 1}
    accuracy = [("acc", "mean", True), ("acc_norm", "mean", True)]
    task("tiny_choice", "questions", "multiple_choice", accuracy, **asked, **shots, **tag)
    task("tiny_choice_bare", "questions", "multiple_choice", accuracy, **asked, **tag)
    task(
        "tiny_last_word", "questions", "loglikelihood",
        [("perplexity", "perplexity", False), ("acc", "mean", True)],
        doc_to_text="{{q}} ", doc_to_target="{{choices[0]}}",
    )  # fmt: skip
    task(
        "tiny_texts", "texts", "loglikelihood_rolling",
        [(name, rule, False) for name, rule in COUNTS.items()],
        doc_to_text="", doc_to_target="{{text}}",
    )  # fmt: skip
    task(
        "tiny_writing", "questions", "generate_until", [("exact_match", "mean", True)],
        doc_to_text="{{q}}", doc_to_target="{{choices[a]}}",
        generation_kwargs={"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False},
    )  # fmt: skip
    group = {
        "group": "tiny_group", "task": ["tiny_choice", "tiny_choice_bare"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 1},
    }  # fmt: skip
    (folder / "tiny_group.yaml").write_text(yaml.safe_dump(group))
    return str(folder)
