"""Prepares data once for many trainings: python -m lcjax.data prepare|teacher|lengths --help.

prepare: writes token ids, from --path=TEXT with --tokenizer=MODEL to --out=FOLDER.
teacher: writes rows with a model's next-token probabilities, from --config=FILE to --out=FOLDER.
lengths: prints how long the rows of a training are, of --config=FILE.
"""

import sys

from lcjax.config.help import print_help


def main(argv: list[str] | None = None) -> int:
    command, *args = list(sys.argv[1:] if argv is None else argv) or [""]
    if command in ("-h", "--help"):
        print_help(__doc__)
        return 0
    if command == "prepare":
        # Imports no more than it needs, since it starts many processes.
        import jax

        from lcjax import config
        from lcjax.data.prepare import PrepareConfig, prepare

        jax.config.update("jax_platforms", "cpu")  # the lock must not open an accelerator
        return config.main(PrepareConfig, prepare, args)
    if command == "teacher":
        from lcjax.data.teacher import TeacherConfig, write_teacher_rows
        from lcjax.parallel import distributed

        return distributed.main(TeacherConfig, write_teacher_rows, args)
    if command == "lengths":
        from lcjax import config
        from lcjax.data.lengths import LengthsConfig, report

        return config.main(LengthsConfig, report, args)
    problem = f"{command} is not a command" if command else "no command"
    print(f"error: {problem}; write: python -m lcjax.data prepare --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
