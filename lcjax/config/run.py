"""What the `run:` sections of all scripts have in common."""

import contextlib
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lcjax.errors import InputError

ERROR = "error.txt"  # the traceback of a failure that was none of the settings


@dataclass(frozen=True)
class RunFolder:
    """Where the results go, and what happens when some are there."""

    folder: str
    # What happens to a run in folder; overwrite removes the files of that run and no others.
    existing: Literal["resume", "overwrite", "refuse"] = "resume"

    def __post_init__(self):
        if not self.folder.strip():
            raise InputError(f"run.folder={self.folder!r} must name a folder, such as runs/first")


def keep_traceback(config: object) -> str:
    """Writes the traceback of the error at hand to `<run>/error.txt`, and says so.

    To the terminal where the script has no run folder, or none yet, or its disk is full.
    """
    folder = getattr(getattr(config, "run", None), "folder", None)
    if folder is not None and Path(folder).is_dir():
        file = Path(folder, ERROR)
        with contextlib.suppress(OSError):
            file.write_text(traceback.format_exc(), encoding="utf-8")
            return f" (where it happened: {file})"
    traceback.print_exc(file=sys.stderr)
    return ""
