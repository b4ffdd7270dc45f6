"""What the `run:` sections of all scripts have in common."""

from dataclasses import dataclass
from typing import Literal

from lcjax.errors import InputError


@dataclass(frozen=True)
class RunFolder:
    """Where the results go, and what happens when some are there."""

    folder: str
    existing: Literal["resume", "overwrite", "refuse"] = "resume"  # a run that is there already

    def __post_init__(self):
        if not self.folder.strip():
            raise InputError(f"run.folder={self.folder!r} must name a folder, such as runs/first")
