"""Figures inside a page: matplotlib's SVG in the colours of the page, light or dark."""

import re
from pathlib import Path

from lcjax.evaluation.report.plots import COLOURS, GREY

# What a figure draws in these colours takes the page's own.
_PAGE = {
    "#000000": "var(--ink)",
    "#ffffff": "var(--paper)",
    GREY.lower(): "var(--muted)",
    "#e4e4e4": "var(--grid)",
    "#cccccc": "var(--rule)",
    **{colour.lower(): f"var(--c{index})" for index, colour in enumerate(COLOURS)},
}
_REM = 52 / 604.8  # of a page for a point: a figure of the usual 8.4 inches is 52 wide


def inline(path: Path, name: str) -> str | None:
    """The SVG of a figure for the page that holds it; None where the figure was not drawn.

    `name` keeps the names inside one figure apart from those of others.
    """
    path = path.with_suffix(".svg")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if "<svg" not in text:
        return None
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = re.sub(r"<style[^>]*>.*?</style>\s*", "", text, flags=re.S)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)
    text = text.replace("xlink:href", "href")
    # All are drawn to one scale, in which the text of a small one is not larger than others'.
    wide = re.search(r'<svg[^>]*? width="([\d.]+)pt"', text)
    own = f' style="--wide: {float(wide[1]) * _REM:.1f}rem"' if wide else ""
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = _renamed(text, name)
    text = re.sub("#[0-9a-fA-F]{6}", lambda m: _PAGE.get(m.group().lower(), m.group()), text)
    return text.replace("<svg", f'<svg role="img" stroke-linejoin="round"{own}', 1)


def _renamed(text: str, name: str) -> str:
    """Names that something refers to get the figure's; the others go."""
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
