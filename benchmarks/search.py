"""Compares search with FAISS (1M x 384 float32) and bm25s (15,256 passages) on the same cores.

    python benchmarks/search.py flat           # exact search beside IndexFlatIP: 5 minutes, 2 cores
    python benchmarks/search.py approximate    # IVF, IVF-PQ (1M) and HNSW (200k): 15 minutes
    python benchmarks/search.py memory         # exact search in a memory map, peak memory
    python benchmarks/search.py bm25           # building an index of words, beside bm25s: 3 minutes

Every measurement runs in its own process and the sides take turns. FAISS 1.15 uses slower code for
64 queries unless `distance_compute_blas_threshold` is set, to any number; both ways are measured.
Its OpenBLAS may need `OPENBLAS_CORETYPE=SkylakeX` to use AVX-512. Needs
`pip install -e '.[retrieval]'` and 8 GB of memory.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import processes

DIM, BATCH, K = 384, 64, 10
LATENT, CLUSTERS = 32, 1000
SIDES = ("lcjax", "faiss", "faiss blas")
SEARCHES = 3  # timed searches of a process
REFINE_FACTORS = (1, 2, 4, 8, 16)  # candidates of ivf_pq for each of the K rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=["flat", "approximate", "memory", "bm25"])
    parser.add_argument("--rounds", type=int, default=5, help="processes of each side")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--hnsw-rows", type=int, default=200_000)
    parser.add_argument("--kinds", nargs="+", default=["ivf", "ivf_pq", "hnsw"])
    parser.add_argument("--cores", type=int, help="use so many only")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    if arguments.worker:
        cases = {"flat": flat, "approximate": approximate, "memory": memory, "bm25": bm25}
        run = cases[arguments.case]
        print(json.dumps(run(*arguments.worker, arguments.rows)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.case == "bm25":
            report_bm25(Path(folder) / "store", arguments)
            return
        file = Path(folder) / "vectors.npy"
        write_vectors(file, arguments.rows, clusters=arguments.case == "approximate")
        report = {"flat": report_flat, "approximate": report_approximate, "memory": report_memory}
        report[arguments.case](file, arguments)


def vectors_of(generator: np.random.Generator, rows: int, clusters: bool) -> np.ndarray:
    """Returns normal vectors, or unit vectors of clusters near a space of 32 dimensions."""
    if not clusters:
        return generator.standard_normal((rows, DIM), dtype=np.float32)
    world = np.random.default_rng(1)  # the same for vectors and queries
    centers = world.standard_normal((CLUSTERS, LATENT), dtype=np.float32)
    projection = world.standard_normal((LATENT, DIM), dtype=np.float32)
    points = centers[generator.integers(0, CLUSTERS, rows)]
    points = points + 0.5 * generator.standard_normal(points.shape, dtype=np.float32)
    vectors = points @ projection + generator.standard_normal((rows, DIM), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_vectors(file: Path, rows: int, clusters: bool) -> None:
    generator = np.random.default_rng(0)
    array = np.lib.format.open_memmap(file, "w+", np.float32, (rows, DIM))
    for first in range(0, rows, 50_000):
        part = array[first : first + 50_000]
        part[:] = vectors_of(generator, len(part), clusters)
    array.flush()


def queries_of(clusters: bool, count: int = BATCH) -> np.ndarray:
    return vectors_of(np.random.default_rng(2), count, clusters)


def worker(case: str, side: str, file: Path, rows: int, arguments: argparse.Namespace) -> dict:
    words = [__file__, case, "--worker", side, str(file), "--rows", str(rows)]
    if arguments.cores:
        words += ["--cores", str(arguments.cores)]
    result = processes.measured(*words, **processes.CPU)
    print(f"{case} {side}: {result}", file=sys.stderr)
    return result


def seconds_of(function) -> list[float]:
    function()
    seconds = []
    for _ in range(SEARCHES):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return seconds


def flat(side: str, file: str, rows: int) -> dict:
    """Returns seconds of searches of one batch, and the hits of its last query."""
    vectors, queries = np.load(file)[:rows], queries_of(False)
    if side == "lcjax":
        from lcjax.retrieval import ExactIndex

        index = ExactIndex(vectors)
    else:
        import faiss

        if side == "faiss blas":
            faiss.cvar.distance_compute_blas_threshold = 20
        faiss.omp_set_num_threads(len(os.sched_getaffinity(0)))
        index = faiss.IndexFlatIP(DIM)
        index.add(vectors)
    seconds = seconds_of(lambda: index.search(queries, K))
    return {"seconds": seconds, "rows": index.search(queries, K)[1][-1].tolist()}


def report_flat(file: Path, arguments: argparse.Namespace) -> None:
    results = in_turn("flat", arguments.sides, file, arguments)
    rows = {tuple(result["rows"]) for rounds in results.values() for result in rounds}
    print(f"rows of all sides equal: {len(rows) == 1}")
    print_medians(results)


def in_turn(
    case: str, sides: Sequence[str], file: Path, arguments: argparse.Namespace
) -> dict[str, list[dict]]:
    """Runs the processes of all sides; their order alternates from round to round."""
    results = {side: [] for side in sides}
    for number in range(arguments.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            results[side].append(worker(case, side, file, arguments.rows, arguments))
    return results


def print_medians(results: dict[str, list[dict]]) -> None:
    """Prints the seconds of every side, and their ratio to those of the first one."""
    medians = {}
    for side, runs in results.items():
        rounds = [statistics.median(run["seconds"]) for run in runs]
        best = min(min(run["seconds"]) for run in runs)
        medians[side] = statistics.median(rounds)
        first = next(iter(medians))
        print(
            f"{side}: {medians[side]:.3f} s ({min(rounds):.3f} to {max(rounds):.3f}),"
            f" fastest {best:.3f}; {medians[side] / medians[first]:.2f} of {first}'s"
        )


def approximate(kind: str, file: str, rows: int) -> dict:
    """Returns recall, speed and cost of one kind of index; "exact" is the reference."""
    from lcjax.retrieval import ExactIndex, FaissIndex, RefinedIndex, recall

    vectors, queries = np.load(file, mmap_mode="r")[:rows], queries_of(True, 1024)
    exact = ExactIndex(vectors)
    result = {"kind": kind, "rows": rows}
    begin = time.perf_counter()
    index = exact if kind == "exact" else FaissIndex.build(vectors, kind=kind)
    result["build_seconds"] = time.perf_counter() - begin
    searches = {kind: index}
    if kind != "exact":
        result["width"] = index.width
        index.save(file + ".index")
        result["bytes_per_row"] = os.path.getsize(file + ".index") / rows
    if kind == "ivf_pq":
        searches = {f"ivf_pq, {n} k": RefinedIndex(index, vectors, n) for n in REFINE_FACTORS}
        searches["ivf_pq, codes alone"] = index
    result["searches"] = {}
    for name, search in searches.items():
        seconds = seconds_of(functools.partial(search.search, queries, K))
        speed = len(queries) / statistics.median(seconds)
        share = recall(search, exact, queries, K)
        result["searches"][name] = {"recall": share, "queries_per_second": speed}
    return result


def report_approximate(file: Path, arguments: argparse.Namespace) -> None:
    print("| index | rows | recall@10 | queries/s | lists or nodes | build, s | bytes a row |")
    for kind in ("exact", *arguments.kinds):
        rows = min(arguments.rows, arguments.hnsw_rows) if kind == "hnsw" else arguments.rows
        result = worker("approximate", kind, file, rows, arguments)
        for name, search in result["searches"].items():
            print(
                f"| {name} | {rows:,} | {search['recall']:.3f}"
                f" | {search['queries_per_second']:.0f} | {result.get('width', '')}"
                f" | {result['build_seconds']:.0f} | {result.get('bytes_per_row', 4 * DIM):.0f} |"
            )


def memory(limit: str, file: str, rows: int) -> dict:
    """Returns the MB by which a search of a memory map raises the peak, and its seconds."""
    from lcjax.retrieval import ExactIndex

    queries = queries_of(False)
    ExactIndex(queries).search(queries, K)  # JAX's own memory is not counted
    before = peak_bytes()
    vectors = np.load(file, mmap_mode="r")[:rows]
    index = ExactIndex(vectors, memory=int(limit))
    seconds = seconds_of(lambda: index.search(queries, K))
    return {"mb": (peak_bytes() - before) / 1e6, "seconds": statistics.median(seconds)}


def peak_bytes() -> int:
    """Returns the peak resident memory, including mapped pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def report_memory(file: Path, arguments: argparse.Namespace) -> None:
    print(f"vectors: {file.stat().st_size / 1e6:.0f} MB")
    for limit in (64 << 20, 256 << 20, 4 << 30):
        result = worker("memory", str(limit), file, arguments.rows, arguments)
        print(
            f"memory={limit / 1e6:.0f} MB: {result['mb']:.0f} MB more at the peak,"
            f" {result['seconds']:.3f} s a batch"
        )


def bm25(side: str, folder: str, rows: int) -> dict:
    """Returns the seconds to split passages into words, index them and write the index."""
    import bm25s

    from lcjax.retrieval import Datastore, Sparse
    from lcjax.retrieval.datastore import write_sparse

    texts = [text for _, text in Datastore(folder).texts()][:rows]

    def write():
        with tempfile.TemporaryDirectory() as out:
            if side == "lcjax":  # as `build` does, with the checksums of the files
                write_sparse(Path(out), len(texts), texts, Sparse())
                return
            tokens = bm25s.tokenize(texts, stopwords="english", show_progress=False)
            index = bm25s.BM25()
            index.index(tokens, show_progress=False)
            index.save(out, show_progress=False)

    return {"seconds": seconds_of(write), "passages": len(texts)}


def report_bm25(folder: Path, arguments: argparse.Namespace) -> None:
    config = str(processes.ROOT / "configs" / "retrieval_stdlib.yaml")
    words = ["-m", "lcjax.retrieval", "build", "--config", config, f"--out={folder}"]
    print(processes.python(*words, **processes.CPU), end="")
    results = in_turn("bm25", ("lcjax", "bm25s"), folder, arguments)
    print_medians(results)


if __name__ == "__main__":
    main()
