"""Tokenises text once: python -m lcjax.data prepare --path=TEXT --tokenizer=MODEL --out=FOLDER."""

import sys

from lcjax import config
from lcjax.data.prepare import PrepareConfig, prepare


def main(argv: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        words.insert(0, "prepare")
    if words[:1] != ["prepare"]:
        given = f"{words[0]} is not known" if words else "nothing was asked for"
        print(f"error: {given}; write: python -m lcjax.data prepare --help", file=sys.stderr)
        return 2
    return config.main(PrepareConfig, prepare, words[1:])


if __name__ == "__main__":
    sys.exit(main())
