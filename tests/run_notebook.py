"""Runs a notebook from its .py: `python tests/run_notebook.py notebooks/kernels.py --figures docs`.

In an empty folder, with SMOKE=1 unless `--full`, and without its cell of `%pip`: what it needs is
installed. `--figures` keeps its pictures as docs/kernels_1.png, ...; `--set NAME=VALUE` replaces a
size of the cell with `SMOKE`.
"""

import argparse
import base64
import os
import re
import tempfile
from pathlib import Path

import jupytext
import nbclient
import nbformat

INSTALL = "install"  # tag of the cell that needs the network


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook that a percent-format file stands for."""
    return jupytext.read(path)


def has_tag(cell: nbformat.NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def execute(
    path: Path, folder: Path, *, smoke: bool = True, sizes: dict[str, str] | None = None
) -> nbformat.NotebookNode:
    """Runs all cells in order in `folder`; an error of a cell is raised.

    Args:
      path: the .py file.
      folder: the working folder.
      smoke: whether SMOKE is set.
      sizes: by name, the code that stands in place of a size's value in the cell that reads SMOKE.
    """
    notebook = read(path)
    notebook.cells = [cell for cell in notebook.cells if not has_tag(cell, INSTALL)]
    for name, value in (sizes or {}).items():
        cell = next(cell for cell in notebook.cells if '"SMOKE"' in cell.source)
        cell.source, count = re.subn(
            rf"^{name} = .*$", f"{name} = {value}", cell.source, flags=re.MULTILINE
        )
        if count != 1:
            raise ValueError(f"{path} has no line {name} = ...")
    environment = os.environ | {"SMOKE": "1" if smoke else ""}
    client = nbclient.NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute(env=environment)


def pictures(notebook: nbformat.NotebookNode) -> list[bytes]:
    """The PNG outputs of all cells, in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    data = [output.get("data", {}).get("image/png") for output in outputs]
    return [base64.b64decode(png) for png in data if png]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--full", action="store_true", help="without SMOKE")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--figures", type=Path, help="folder for the pictures")
    parser.add_argument("--out", type=Path, help="the executed notebook")
    args = parser.parse_args()
    sizes = dict(word.split("=", 1) for word in args.set)
    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(args.notebook, Path(folder), smoke=not args.full, sizes=sizes)
    if args.out:
        nbformat.write(notebook, args.out)
    if args.figures:
        for number, png in enumerate(pictures(notebook), 1):
            (args.figures / f"{args.notebook.stem}_{number}.png").write_bytes(png)


if __name__ == "__main__":
    main()
