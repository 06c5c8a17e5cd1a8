"""Sphinx: settings, states and errors are printed from the code, so that they cannot drift from it."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

import django  # noqa: E402

django.setup()

project = "django_pglock"
author = "The django_pglock founders"
copyright = "2026, The django_pglock founders"
extensions = ["myst_parser", "sphinx.ext.autodoc", "printed_from_code", "searches", "timeline"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "django_pglock"
html_static_path = ["_static"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False
# Options of commands are no dashes.
smartquotes = False
# Addresses of the reader's own machine.
linkcheck_ignore = [r"http://127\.0\.0\.1"]
