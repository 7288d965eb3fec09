"""The site: our Markdown pages, a gallery that is executed, the interface from the docstrings. Built by `make docs`."""

import os
import sys
from importlib.metadata import version as installed
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "fednmap"
author = "The fednmap developers"
copyright = "2026, the fednmap developers"
version = release = installed("fednmap")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "commands",
    "docstrings",
    "interface",
    "methods",
]
exclude_patterns = [
    "_build",
    "reproduction/runs",
    "gallery/**/*.py.md5",
    "sg_execution_times.rst",
]
templates_path = ["_templates"]
default_role = "code"
suppress_warnings = ["config.cache"]  # the gallery's settings hold functions

myst_enable_extensions = ["amsmath", "attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80  # then one argument per line
autodoc_inherit_docstrings = False  # what an interface says is said once, on the page of core
highlight_language = "text"
autodoc_default_options = {"members": True}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_",
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "plot_gallery": "True",
    "abort_on_example_error": True,
    "matplotlib_animations": (True, "jshtml"),
}

html_theme = "pydata_sphinx_theme"
html_title = "fednmap"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
repository = os.environ.get("FEDNMAP_REPOSITORY")  # where the code is read, known to who publishes the site
html_theme_options = {
    "logo": {"text": f"fednmap {version}"},
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "icon_links": [{"name": "Code", "url": repository, "icon": "fa-solid fa-code-branch"}] if repository else [],
    "show_prev_next": False,
    "header_links_before_dropdown": 6,
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_sidebars = {"index": []}
