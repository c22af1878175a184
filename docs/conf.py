# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Settings of the documentation site."""

import os

from numpyro_pdmp import __version__

project = "numpyro_pdmp"
copyright = "the numpyro_pdmp developers"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",  # the site works without a network
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "numpyro_pdmp"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sphinx = False

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # parameters are described in the text
# Docstrings use NumPyro's conventions, in which a type may stand before the name.
nitpicky = False

nb_execution_mode = "off" if os.environ.get("DOCS_NO_RUN") else "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
