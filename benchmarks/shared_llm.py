"""SharedLLM: what its settings cost, and beside CEPE and full attention, in one run.

    python benchmarks/shared_llm.py                                # SmolLM2-135M on a CPU
    python benchmarks/shared_llm.py reading --lengths 131072 --sides shared_llm cepe
    python benchmarks/shared_llm.py settings --decoder llama2-7b --dtype bfloat16
    python benchmarks/shared_llm.py reading --lengths 8192 32768 131072 --decoder llama2-7b \
        --encoder cepe-encoder --dtype bfloat16                    # a GPU or TPU

settings: a text of 8,192 tokens is read once, its last 4,096 by the model and the others in chunks
    of 1,024, with another number of layers M, another compression beta and another depth of the
    trees, each by itself, as tables 11-13 of the paper (arXiv 2410.19318, app.); and a search for
    the question. Beta is what a chunk has tokens for each that is kept of it.
reading: the same text read and continued by SharedLLM, CEPE (chunks of 256) and full attention.
    Both keep keys and values of what they read.
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
# Nearly as much is kept at each depth; ratios are whole numbers, so not quite.
DEPTHS = {1: (8,), 2: (12, 6), 3: RATIOS, 4: (20, 10, 5, 3)}
# Seconds and GB of tables 11-13 (Llama-2-7B on an A800), by the setting.
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
    """(what is changed, to what, the fields of the section)."""
    depth = args.layers or 10**6
    found = [("M", count, {"layers": count}) for count in (1, 2, 4, 8, 16) if count <= depth]
    found += [("beta", beta, {"ratios": ratios}) for beta, ratios in BETAS.items()]
    found += [("depth", depth, {"ratios": ratios}) for depth, ratios in DEPTHS.items()]
    return [*found, ("policy", "query", {"policy": "query"})]


def shared(args, fields: dict):
    """The decoder with SharedLLM as the paper has it, but for `fields`, which are JSON."""
    from lcjax.memory import QueryAware, Right

    fields = fields | {"policy": QueryAware() if fields.get("policy") == "query" else Right()}
    if "ratios" in fields:
        fields["ratios"] = tuple(fields["ratios"])
    return bench.with_shared_llm(bench.decoder(args), **fields, chunk=args.chunk)


def read_and_write(args, side: str, length: int, fields: dict) -> dict:
    """One process."""
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
        found = bench.spawn(__file__, "shared_llm", str(length), json.dumps(fields))
        usual = usual or found
        seconds, base = (x["encode"] + x["prefill"] for x in (found, usual))
        paper = PAPER.get((name, value), ("", ""))
        print(
            f"| {name} {value} | {found['kept']:,} | {found['encode']:.2f} | {found['prefill']:.2f}"
            f" | {seconds / base:.2f} | {found['peak_gb']:.2f}"
            f" | {found['peak_gb'] / usual['peak_gb']:.2f} | {paper[0]} | {paper[1]} |",
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
