"""The documentation site: `sphinx-build -c docs . build/site`, from the root of the repository.

Its pages are the Markdown files where they lie, so every link between them works on a code host as
well. `site_pages.py` writes those of docs/reference, from docstrings and configs.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import site_pages  # noqa: E402
from sphinx.ext import autosummary  # noqa: E402

project = "lcjax"
author = "the lcjax authors"
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "launch/*.md", "notebooks/*.ipynb"]
exclude_patterns = ["build", "runs", "**/.*"]
nitpicky = True  # a reference that leads nowhere is a warning

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # docs/notebooks.md has pictures of a run

autodoc_inherit_docstrings = False  # an override without a docstring does what the base says
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autosummary.WELL_KNOWN_ABBREVIATIONS += ("sec.", "eq.", "fig.", "App.")
autosummary_generate = False  # tables alone: all names of a module are on one page
default_role = "code"  # docstrings write code between single backticks
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"  # that of JAX and Flax
html_title = "lcjax"
html_copy_source = False  # `site_pages.finish` copies the Markdown beside the pages
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_favicon = "favicon.svg"
html_context = {"default_mode": "auto"}
html_theme_options = {
    "footer_content_items": ["copyright"],
    "navbar_persistent": [],  # the search is in the sidebar
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}


def setup(app):
    app.add_post_transform(site_pages.LinkNames)
    app.connect("builder-inited", site_pages.write)
    app.connect("autodoc-process-docstring", site_pages.process_docstring, priority=400)
    app.connect("autodoc-process-signature", site_pages.process_signature)
    app.connect("autodoc-skip-member", site_pages.skip_member)
    app.connect("missing-reference", site_pages.resolve_type)
    app.connect("build-finished", site_pages.finish)
