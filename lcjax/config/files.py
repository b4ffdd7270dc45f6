"""Writing files that others may be reading, and that no killed process leaves half written."""

import os
from pathlib import Path


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Writes a file whole or not at all; makes its folder if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
