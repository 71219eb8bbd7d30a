"""The documents as pages, by Sphinx and MyST: `make docs` writes `build/docs`.

The root is the project's, as documents link to each other across folders. The notebook
runs while its page is built, on what the last `kedro run` left in `data/`; without one
it is shown without outputs.
"""

from pathlib import Path
from typing import Any

project = "flatout"
extensions = ["myst_nb", "sphinxcontrib.mermaid"]
myst_fence_as_directive = ["mermaid"]
html_theme = "furo"
root_doc = "README"
include_patterns = ["*.md", "conf/README.md", "docs/**", "tests/README.md"]
include_patterns += ["notebooks/*.ipynb", "src/**/README.md"]
myst_heading_anchors = 3

PROJECT = Path(__file__).parents[1]
HAS_RUN = (PROJECT / "data/08_reporting/train_report.json").is_file()
nb_execution_mode = "force" if HAS_RUN else "off"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

SIDEBAR = {
    "Start": ["docs/README", "docs/tasks", "docs/troubleshooting", "docs/parameters"],
    "Guides": ["docs/guides/*", "docs/five_guides", "docs/coming_from_the_trainer"],
    "Pipelines": ["docs/pipelines/*", "conf/README", "notebooks/review"],
    "Optimisations": ["docs/optimisations", "docs/benchmarks"],
    "Inside": ["docs/architecture", "docs/engine", "docs/own_task", "CONTRIBUTING"],
    "Log": ["CHANGELOG", "docs/migration", "docs/log"],
    "Words": ["docs/glossary", "docs/glossary.ko", "README.ko"],
    "Beside the code": ["tests/README", "src/**"],
}


def add_sidebar(app: Any, page: str, source: list[str]) -> None:
    """Its table of contents, which a README on the repository's host has no use for."""
    for title, pages in SIDEBAR.items() if page == root_doc else ():
        head = f"{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n"
        source[0] += "\n```{}\n{}\n```\n".format(head, "\n".join(pages))


def setup(app: Any) -> None:
    app.connect("source-read", add_sidebar)
