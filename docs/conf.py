"""The documentation site: `make docs` builds it into build/docs; a warning is an error."""

from __future__ import annotations

import re
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

import spectrain_ext

project = "spectrain_ext"
author = copyright = "the spectrain_ext authors"
version = release = spectrain_ext.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py"]

html_theme = "furo"
html_title = f"spectrain_ext {version}"

# Links between the pages are those that work on a code host as well: to files and to headings.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist", "colon_fence", "dollarmath"]

html_math_renderer = "mathml"  # browsers draw it: no script, no network

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A link to a text outside this folder, which is no page of the site.
_OUTSIDE = re.compile(r"\[([^\]`]+)\]\((\.\./[^)#]+\.md)(?:#[^)]*)?\)")


def _offer(_: object, __: str, source: list[str]) -> None:
    """Offer these texts for download."""
    source[0] = _OUTSIDE.sub(r"{download}`\1 <\2>`", source[0])


def _formula(translator: Any, node: Any) -> None:
    translator.body.append(convert(node.astext()))
    raise SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", inline_renderers=(_formula, None))
    app.connect("source-read", _offer)
