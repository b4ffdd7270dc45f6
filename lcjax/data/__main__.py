"""Reads text once, for later: python -m lcjax.data prepare, or teacher; --help says what to give.

prepare: token ids, of --path=TEXT with --tokenizer=MODEL in --out=FOLDER.
teacher: rows with a model's probabilities of the next token, of --config=FILE in --out=FOLDER.
"""

import sys
from collections.abc import Callable

COMMANDS = ("prepare", "teacher")


def main(argv: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if words[:1] in ([name] for name in COMMANDS):
        return _command(words[0])(words[1:])
    given = f"{words[0]} is not known" if words else "nothing was asked for"
    print(f"error: {given}; write: python -m lcjax.data prepare --help", file=sys.stderr)
    return 2


def _command(name: str) -> Callable[[list[str]], int]:
    """Imports no more than the command needs: `prepare` starts many processes."""
    if name == "teacher":
        from lcjax.data.teacher import TeacherConfig, teach
        from lcjax.parallel import distributed

        return lambda words: distributed.main(TeacherConfig, teach, words)
    from lcjax import config
    from lcjax.data.prepare import PrepareConfig, prepare

    return lambda words: config.main(PrepareConfig, prepare, words)


if __name__ == "__main__":
    sys.exit(main())
