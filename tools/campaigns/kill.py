"""Kills trainings and evaluations at random moments, and compares their results bit for bit.

    python -m tools.campaigns.kill --kills 100 --pairs 10 --seed 0
    python -m tools.campaigns.kill --seed 0 --case lora-7

A case is one run: it is started, killed with SIGKILL while it starts, steps, saves or exports, and
started again, one to four times; then it may end. Its checkpoints, exported weights, metrics and
tables must equal those of a run that nothing disturbed. `--pairs` is the number of jobs of two
processes in which process 0 is killed, and of those in which process 1 is: the other one must end
by itself, with one line of ours. Not collected by pytest: an hour on 2 cores.
"""

import argparse
import collections
import contextlib
import csv
import hashlib
import json
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# By path: draccus installs a package of the name `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "training"))

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
from process_support import SCRIPT, Job
from training_support import tiny, write_corpus

from lcjax.data import Chunks
from lcjax.memory import AutoCompressorSection, CepeSection
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh
from lcjax.training.train_config import EvalSection, TrainConfig

END = 30  # seconds in which a process ends after its peer was killed
LIMIT = 300  # seconds after which a start hangs
# Measured values, which differ between any two runs.
MEASURED = {"tokens_per_second", "mfu", "seconds", "compile_seconds"}
MEASURED |= {"peak_bytes", "peak_bytes_at_most"}

EVALUATION = """
model: {{preset: tiny}}
methods: [{{name: base}}, {{name: linear, rope: {{type: linear, factor: 2}}}}]
tasks: [{{type: perplexity, protocol: slide_full}}, {{type: passkey, depths: 2, max_new_tokens: 4}}]
lengths: [448, 512]
stride: 64
max_windows: 4
data: {{path: {corpus}}}
run: {{folder: {folder}}}
"""


def training(name: str) -> Callable[[Path, Path], TrainConfig]:
    """Returns a function of (run folder, corpus) that makes the config of this name."""
    chunks = Chunks(count=2, length=16)
    settings = {
        "plain": {"ema": 0.9},
        "lora": {"lora": LoRA(rank=2), "on_nan": "skip", "spike": 5.0},
        "accumulation": {"accumulation": 2, "log_every": 2},
        "memory": {
            "model": {"preset": "tiny", "memory": CepeSection(encoder="tiny-encoder")},
            "data": {"length": 64, "chunks": chunks, "document_mask": False},
            "trainable": ("memory",),
        },
        "summary": {
            "model": {"preset": "tiny", "memory": AutoCompressorSection(chunk=16, summary=3)},
            "data": {"length": 64, "chunks": chunks, "document_mask": False},
            "trainable": ("memory", "lora"),
            "lora": LoRA(rank=2, targets=("query", "value")),
        },
        "validation": {"data": {"holdout": 0.2, "shuffle_rows": 8, "pack": "best_fit"}},
    }[name]

    def config(folder: Path, corpus: Path) -> TrainConfig:
        made = tiny(folder, corpus, mesh=Mesh(), **settings)
        return made.replace(eval=EvalSection(every=3, batches=2)) if name == "validation" else made

    return config


TRAININGS = ("plain", "lora", "accumulation", "memory", "summary", "validation")
KINDS = (*TRAININGS, "eval")


class Campaign:
    """A folder with a corpus, the programs that were compiled, and the undisturbed runs."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed = folder, seed
        self.corpus, self.cache = write_corpus(folder / "corpus"), folder / "xla"
        self.counts: collections.Counter = collections.Counter()
        self.failures: list[str] = []
        self.kills = 0
        self.longest = 0.0  # seconds that a process ran after its peer was killed

    def run(self, kills: int, pairs: int) -> None:
        """Runs cases until there are so many kills, and then pairs of each kind."""
        begin, number = time.monotonic(), 0
        while (done := self.kills) < kills:
            name = f"{KINDS[number % len(KINDS)]}-{number}"
            self.case(name)
            number += 1
            seconds = time.monotonic() - begin
            print(f"{seconds:5.0f} s  {done} + {self.kills - done} kills: {name}", flush=True)
        for number in range(pairs):
            for victim in (0, 1):
                self.pair(f"pair-{victim}-{number}")
                print(f"{time.monotonic() - begin:5.0f} s  pair-{victim}-{number}", flush=True)

    def start(self, kind: str, folder: Path, **options) -> Job:
        if kind == "eval":
            config = EVALUATION.format(corpus=self.corpus, folder=folder)
        else:
            config = training(kind)(folder, self.corpus)
        code = SCRIPT.format("eval.py" if kind == "eval" else "train.py")
        options = {"code": code, "processes": 1, "devices": 1} | options
        return Job(config, self.folder, self.cache, **options)

    def reference(self, kind: str, processes: int = 1) -> Path:
        """Returns the folder of an undisturbed run; makes it at the first call."""
        folder = self.folder / f"reference_{kind}_{processes}"
        if not folder.exists():
            (code, log), *_ = self.start(kind, folder, processes=processes).end(LIMIT)
            if code:
                raise RuntimeError(f"the undisturbed run of {kind} failed:\n{log}")
        return folder

    def case(self, name: str) -> None:
        """Kills and restarts one run, and compares it with an undisturbed one."""
        kind = name.partition("-")[0]
        reference = self.reference(kind)
        choose, folder = random.Random(f"{self.seed} {name}"), self.folder / name
        for _ in range(choose.randint(1, 4)):
            job, (phase, has_come, jitter) = self.start(kind, folder), moment(kind, choose)
            process, begin = job.processes[0], time.monotonic()
            while process.poll() is None and not has_come(folder, time.monotonic() - begin):
                time.sleep(0.002)
                if time.monotonic() - begin > LIMIT:
                    self.fail(name, f"hangs: no {phase} after {LIMIT} s")
                    break
            time.sleep(jitter)
            process.kill()
            ((code, log),) = job.end(LIMIT)
            if code == -signal.SIGKILL:
                self.kills += 1
                self.counts[f"killed: {phase}"] += 1
            elif code:
                self.fail(name, f"a start ended with {code}: {log[-500:]}")
                return
            else:  # it ended before the moment came
                break
        ((code, log),) = self.start(kind, folder).end(LIMIT)
        if code:
            self.fail(name, f"the last start ended with {code}: {log[-500:]}")
        else:
            self.compare(name, folder, reference)
        shutil.rmtree(folder, ignore_errors=True)

    def pair(self, name: str) -> None:
        """Kills one process of two, waits for the other, and starts both again."""
        victim, reference = int(name.split("-")[1]), self.reference("plain", 2)
        choose, folder = random.Random(f"{self.seed} {name}"), self.folder / name
        job, lines = self.start("plain", folder, processes=2), choose.randint(1, 11)
        begin = time.monotonic()
        while num_lines(folder / "metrics.jsonl") < lines and time.monotonic() - begin < LIMIT:
            time.sleep(0.002)
        time.sleep(choose.uniform(0, 0.05))
        job.processes[victim].kill()
        begin = time.monotonic()
        codes = job.end(2 * END)
        seconds = time.monotonic() - begin
        code, log = codes[1 - victim]
        errors = [line for line in log.splitlines() if line.startswith("error:")]
        if codes[victim][0] != -signal.SIGKILL:
            self.counts["not killed: it had ended"] += 1
        elif seconds > END:
            self.fail(name, f"the other process ran for {seconds:.0f} s more")
        elif len(errors) != 1 or code in (0, -signal.SIGKILL):
            self.fail(name, f"it ended with {code} and {len(errors)} lines of ours: {log[-300:]}")
        else:
            self.counts[f"killed: process {victim} of 2"] += 1
            self.longest = max(self.longest, seconds)
        restarted = self.start("plain", folder, processes=2).end(LIMIT)
        if any(code for code, _ in restarted):
            self.fail(
                name, f"the restart ended with {[(code, log[-500:]) for code, log in restarted]}"
            )
        else:
            self.compare(name, folder, reference)
        shutil.rmtree(folder, ignore_errors=True)

    def compare(self, name: str, folder: Path, reference: Path) -> None:
        actual, expected = results(folder), results(reference)
        differences = [
            key for key in actual.keys() | expected.keys() if actual.get(key) != expected.get(key)
        ]
        if differences:
            self.fail(name, f"differs in {', '.join(sorted(differences)[:5])}")
        else:
            self.counts["runs that ended bit-equal"] += 1

    def fail(self, name: str, reason: str) -> None:
        self.counts["failures"] += 1
        command = f"python -m tools.campaigns.kill --seed {self.seed} --case {name}"
        self.failures.append(f"{name}: {reason}\n  {command}")
        print(f"FAILED {self.failures[-1]}", flush=True)


def num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def moment(kind: str, choose: random.Random) -> tuple[str, Callable[[Path, float], bool], float]:
    """Returns (phase, whether it has come to a folder after some seconds, seconds after that)."""
    phase = choose.choice(("start", "step", "step", "save", "save", "export"))
    if phase == "start":
        seconds = choose.uniform(0.5, 6.0)
        return phase, lambda _, elapsed: elapsed > seconds, 0.0
    if kind == "eval":
        if phase == "export":
            return "report", lambda folder, _: (folder / "tables").exists(), choose.uniform(0, 1.5)
        lines = choose.randint(1, 15)
        records = "records/*.jsonl"
        has_come = lambda folder, _: sum(map(num_lines, folder.glob(records))) >= lines  # noqa: E731
        return "record", has_come, choose.uniform(0, 0.05)
    if phase == "step":
        lines = choose.randint(1, 12)
        has_come = lambda folder, _: num_lines(folder / "metrics.jsonl") >= lines  # noqa: E731
        return phase, has_come, choose.uniform(0, 0.05)
    if phase == "save":
        step = choose.choice((4, 8, 12))
        # orbax writes to a folder `4.orbax-...`, which it renames.
        drafts, jitter = f"checkpoints/{step}*", choose.uniform(0, 0.15)
        return phase, lambda folder, _: any(folder.glob(drafts)), jitter
    drafts = (".model.partial-*", ".adapter.partial-*", "model")
    has_come = lambda folder, _: any(any(folder.glob(name)) for name in drafts)  # noqa: E731
    return phase, has_come, choose.uniform(0, 0.1)


def results(folder: Path) -> dict[str, str]:
    """Returns a digest of each result of a run that must not depend on when it was killed."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    names = [name for name in names if not name.startswith("checkpoints/")]
    digests = {"names of the files": digest(names)}
    for name in names:
        path = folder / name
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            digests[name] = digest([without_measured(row) for row in rows])
        elif path.suffix == ".csv":
            rows = csv.DictReader(path.read_text().splitlines())
            digests[name] = digest([without_measured(row) for row in rows])
        elif name.startswith(("model/", "adapter/", "tokenizer/")) or path.suffix == ".tex":
            digests[name] = digest(path.read_bytes())
    for path in sorted(folder.glob("checkpoints/*")):
        digests[f"checkpoints/{path.name}"] = "there"
        if path.name.isdigit():
            try:
                digests |= checkpoint(path)
            except (OSError, ValueError, KeyError) as error:
                digests[f"checkpoints/{path.name}"] = f"cannot be read: {error}"
    return digests


def checkpoint(path: Path) -> dict[str, str]:
    """Returns a digest of every array of a checkpoint, and of its position in the data."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = ocp.checkpointables_metadata(path).metadata["state"]
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), saved
    )
    state = ocp.load_checkpointables(path, {"state": abstract})["state"]
    position = json.loads((path / "data/position.json").read_text())
    digests = {f"checkpoints/{path.name}: position": digest(position)}
    for key, leaf in jax.tree.leaves_with_path(state):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        value = f"{array.dtype} {array.shape} ".encode() + array.tobytes()
        digests[f"checkpoints/{path.name}: {jax.tree_util.keystr(key)}"] = digest(value)
    return digests


def without_measured(row: dict) -> dict:
    return {key: value for key, value in row.items() if key not in (*MEASURED, "crc")}


def digest(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="of runs of one process, at least")
    parser.add_argument("--pairs", type=int, default=10, help="kills of each of two processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="only this one, such as lora-7 or pair-0-3")
    args = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lcjax_kill_") as folder:
        campaign = Campaign(Path(folder), args.seed)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C: the counts so far
            if args.case:
                (campaign.pair if args.case.startswith("pair-") else campaign.case)(args.case)
            else:
                campaign.run(args.kills, args.pairs)
    print(f"\nseed {args.seed}, {(time.monotonic() - begin) / 60:.0f} minutes")
    for name, count in sorted(campaign.counts.items()):
        print(f"{count:5}  {name}")
    if campaign.longest:
        print(f"{campaign.longest:5.0f}  seconds until the other process had ended, at most")
    print(*campaign.failures, sep="\n")
    return int(bool(campaign.failures))


if __name__ == "__main__":
    sys.exit(main())
