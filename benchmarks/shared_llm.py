"""Measures the cost of SharedLLM's settings, and compares it with CEPE and full attention.

    python benchmarks/shared_llm.py                                # SmolLM2-135M on a CPU
    python benchmarks/shared_llm.py reading --lengths 131072 --sides shared_llm cepe
    python benchmarks/shared_llm.py settings --decoder llama2-7b --dtype bfloat16
    python benchmarks/shared_llm.py reading --lengths 8192 32768 131072 --decoder llama2-7b \
        --encoder cepe-encoder --dtype bfloat16                    # a GPU or TPU

settings: a text of 8,192 tokens is read once, its last 4,096 tokens by the decoder and the others
    in chunks of 1,024. The number of layers M, the compression beta and the depth of the trees are
    changed one at a time, as in tables 11-13 of the paper (arXiv 2410.19318, app. C); the last row
    searches for the question. Beta is the number of tokens of a chunk per token that is kept.
reading: the same text is read and continued by SharedLLM, CEPE (chunks of 256) and full attention.
    SharedLLM and CEPE both store keys and values of the context.
"""

import argparse
import json

import reading as bench

CHUNK, RATIOS = bench.SHARED_LLM["chunk"], bench.SHARED_LLM["ratios"]
BETAS = {
    64: (128, 64, 32),
    32: (64, 32, 16),
    16: (32, 16, 8),
    8: RATIOS,
    4: (8, 4, 2),
    2: (2, 2, 2),
    1: (1, 1, 1),
}
# Nearly equal numbers of tokens are kept at each depth; ratios must be whole numbers.
DEPTHS = {1: (8,), 2: (12, 6), 3: RATIOS, 4: (20, 10, 5, 3)}
# (seconds, GB) of tables 11-13 (Llama-2-7B on an A800), by setting.
PAPER = {
    ("M", 1): (6.78, 21.04),
    ("M", 2): (9.35, 21.50),
    ("M", 4): (11.81, 22.39),
    ("M", 8): (16.81, 24.08),
    ("M", 16): (25.85, 27.82),
    ("beta", 64): (11.68, 22.20),
    ("beta", 32): (11.73, 22.20),
    ("beta", 16): (11.78, 22.20),
    ("beta", 8): (11.81, 22.39),
    ("beta", 4): (11.87, 22.40),
    ("beta", 2): (12.04, 22.35),
    ("beta", 1): (12.47, 22.97),
    ("depth", 1): (11.16, 19.72),
    ("depth", 2): (11.55, 22.42),
    ("depth", 3): (11.81, 22.39),
    ("depth", 4): (11.86, 22.41),
}
SIDES = {"shared_llm": "SharedLLM", "cepe": "CEPE", "full": bench.FULL}
CLAIM = "the paper (Llama-2-7B, A800): 3x CEPE's speed; full attention out of memory at 131,072"
SEARCH = "the paper: a search costs about 15 % more of both, 25.44 GB"


def settings(args) -> list[tuple[str, int | str, dict]]:
    """Returns (setting, value, fields of the memory section) for each run."""
    depth = args.layers or 10**6
    runs = [("M", count, {"layers": count}) for count in (1, 2, 4, 8, 16) if count <= depth]
    runs += [("beta", beta, {"ratios": ratios}) for beta, ratios in BETAS.items()]
    runs += [("depth", depth, {"ratios": ratios}) for depth, ratios in DEPTHS.items()]
    return [*runs, ("policy", "query", {"policy": "query"})]


def shared(args, fields: dict):
    """Returns the decoder with the paper's SharedLLM, apart from `fields` (from JSON)."""
    from lcjax.memory import QueryAware, Right

    fields = fields | {"policy": QueryAware() if fields.get("policy") == "query" else Right()}
    if "ratios" in fields:
        fields["ratios"] = tuple(fields["ratios"])
    return bench.with_shared_llm(bench.decoder(args), **fields, chunk=args.chunk)


def read_and_write(args, side: str, length: int, fields: dict) -> dict:
    """Measures one side and length; runs in a process of its own."""
    if side == "shared_llm":
        return bench.read_and_write(shared(args, fields), length, chunk=args.chunk)
    config = bench.decoder(args)
    if side == "full":
        return bench.read_and_write(config, length, chunk=None)
    cepe = bench.with_cepe(config, args.encoder)
    return bench.read_and_write(cepe, length, chunk=args.cepe_chunk, projected=True)


def costs(args) -> None:
    length, usual = args.lengths[0], None
    print(f"{length:,} tokens; M 4, beta 8, depth 3 are the usual ones")
    print("| | kept | encode s | prefill s | of usual | peak GB | of usual | paper: s | GB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, value, fields in [("usual", "", {}), *settings(args)]:
        run = bench.spawn(__file__, "shared_llm", str(length), json.dumps(fields))
        usual = usual or run
        seconds, base = (x["encode"] + x["prefill"] for x in (run, usual))
        paper = PAPER.get((name, value), ("", ""))
        print(
            f"| {name} {value} | {run['kept']:,} | {run['encode']:.2f} | {run['prefill']:.2f}"
            f" | {seconds / base:.2f} | {run['peak_gb']:.2f}"
            f" | {run['peak_gb'] / usual['peak_gb']:.2f} | {paper[0]} | {paper[1]} |",
            flush=True,
        )
    print(SEARCH)


def reading(args) -> None:
    print(bench.HEAD)
    for length in args.lengths:
        sides = {SIDES[side]: bench.spawn(__file__, side, str(length), "{}") for side in args.sides}
        print("\n".join(bench.beside_full(length, sides)), flush=True)
        if {"shared_llm", "cepe"} <= set(args.sides):
            ours, cepe = (bench.reads(sides[SIDES[side]]) for side in ("shared_llm", "cepe"))
            print(f"{length:,} tokens: SharedLLM reads {cepe / ours:.2f}x as fast as CEPE")
    print(CLAIM)


PARTS = {"settings": costs, "reading": reading}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    bench.options(parser, [8192, 32768, 131_072])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="of reading")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of a chunk of SharedLLM")
    parser.add_argument("--cepe-chunk", type=int, default=256, help="and of CEPE")
    args = parser.parse_args()
    if args.worker:
        side, length, fields = args.worker
        print(json.dumps(read_and_write(args, side, int(length), json.loads(fields))))
        return
    bench.run(args, parser, PARTS)


if __name__ == "__main__":
    main()
