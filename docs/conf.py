"""Builds the documents as web pages with Sphinx and MyST, in `build/docs`: `make docs`.

The source folder is the project, because documents link to each other across folders.
The notebook is executed during the build with the output of the last `kedro run` in
`data/`; without such a run it is shown without outputs.
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
    "Start": [
        *("docs/README", "docs/tasks", "docs/lora", "docs/answers"),
        *("docs/troubleshooting", "docs/parameters"),
    ],
    "Guides": [
        *(f"docs/guides/{name}" for name in ("data", "model", "gpus", "cluster")),
        *(f"docs/guides/{name}" for name in ("memory", "speed", "reproducibility")),
        *("docs/guides/tracking", "docs/guides/*[!o]", "docs/five_guides"),
        "docs/coming_from_the_trainer",
    ],
    "Pipelines": ["docs/pipelines/*", "conf/README", "notebooks/review"],
    "Optimisations": ["docs/optimisations", "docs/benchmarks"],
    "Custom parts": ["docs/own_task", "docs/own_parts", "docs/own_project"],
    "Design": ["docs/architecture", "docs/engine", "CONTRIBUTING"],
    "History": ["CHANGELOG", "docs/migration", "docs/log"],
    "Glossary": ["docs/glossary"],
    "한국어": ["README.ko", "docs/guides/*.ko", "docs/*.ko"],
    "Next to the code": ["tests/README", "src/**"],
}


def add_sidebar(app: Any, page: str, source: list[str]) -> None:
    """Add a table of contents to the root page, which README.md does not need."""
    for title, pages in SIDEBAR.items() if page == root_doc else ():
        head = f"{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n"
        source[0] += "\n```{}\n{}\n```\n".format(head, "\n".join(pages))


def setup(app: Any) -> None:
    app.connect("source-read", add_sidebar)
