"""The documents are correct: commands, parameters, messages, files and both READMEs."""

import re
import shlex
from pathlib import Path

import pytest
from kedro.framework.project import pipelines
from kedro.framework.startup import bootstrap_project
from pydantic import BaseModel

import flatout
from flatout.engine.parameters import Settings
from tests.command_checks import COMMANDS, answer, fault_of
from tests.conftest import PROJECT, kedro
from tests.documents import (
    FOLDERS,
    commands,
    documents,
    fenced_commands,
    fences_and_prose,
    sentences_of_the_code,
    spans,
    table_cells,
)

DOCUMENTS = documents()
PIPELINES = sorted(path.stem for path in (PROJECT / "docs/pipelines").glob("*.md"))
WRITTEN_BY_A_RUN = ("conf/local/", "conf/tuned/", "data/")
OF_HOOKS = {"evaluate": {"wrong_images"}, "train": {"guard"}}
"""Entries on a documentation page that no pipeline uses by itself."""
FREE_PARAMETERS = ("model.config", "model.overrides", "runtime.environment", "tuned")


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(PROJECT).as_posix()
)
def test_every_command_is_one_that_works(document):
    found = {c.place: (c.text, fault_of(c.text)) for c in commands(document)}
    assert not {place: known for place, known in found.items() if known[1]}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("make runn", "No rule to make target"),
        ("kedro run --pipelines=splitt", "no pipeline splitt"),
        ("kedro run --env=slwo", "no environment slwo"),
        ("kedro run --params=train.epoch=2", "did you mean train.epochs"),
        ("kedro run --pipline=train", "No such option"),
        ("kedro sync", "no command sync"),
        ("python -m flatout.drill", "No module named|no module"),
        ("pip install -e '.[develop]'", "no extra develop"),
        ("torchrun -m kedro run --env=fast", "no environment fast"),
        ("rm -rf data", "unknown program rm"),
    ],
)
def test_a_command_that_does_not_work_is_found(text, fault):
    assert re.search(fault, fault_of(text) or "none")


MODULES = sorted(
    {
        found[1]
        for command in COMMANDS
        if (found := re.search(r"python -m (flatout\.\S+)", command.text))
    }
)


@pytest.mark.process
@pytest.mark.parametrize("module", MODULES)
def test_every_module_answers_help(module):
    done = kedro("-m", module, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: ")


def test_make_without_a_target_lists_the_targets():
    listed = re.findall(r"^make (\w+)", answer("make"), re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", (PROJECT / "Makefile").read_text(), re.M)
    assert sorted(listed) == sorted(phony[1].split())


def test_make_needs_no_program_of_an_activated_shell():
    phony = re.search(r"^\.PHONY: (.*)$", (PROJECT / "Makefile").read_text(), re.M)
    lines = answer(
        "make", "-nB", "--no-print-directory", "PYTHON=python3", *phony[1].split()
    )
    joined = lines.replace("\\\n", " ").splitlines()
    programs = {line.split()[0] for line in joined}
    of_the_system = {"awk", "printf", "python3", "rm", "touch"}
    others = programs - of_the_system
    assert len(others) > 5
    assert {name for name in others if not name.startswith(".venv/bin/")} == set()


def is_parameter(path: str) -> bool:
    """Return whether `path` is a parameter or a group of parameters."""
    if path.startswith(FREE_PARAMETERS):
        return True
    model: object = Settings
    for name in path.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return False
        if name not in model.model_fields:
            return False
        model = model.model_fields[name].annotation
    return True


def test_every_parameter_that_is_named_exists():
    groups = "|".join(Settings.model_fields)
    pattern = re.compile(rf"(?:--params=)?((?:{groups})(?:\.[a-z_0-9]+)+)(?=$|[:= ])")
    named = [
        (span.place, found[1])
        for path in DOCUMENTS
        for span in spans(path)
        if (found := pattern.match(span.text))
        and not re.search(r"\.(py|yml|yaml|json|onnx|pt2)$", found[1])
    ]
    assert len(named) > 50
    assert [(place, name) for place, name in named if not is_parameter(name)] == []


def test_every_link_and_file_that_is_named_exists():
    inside = [path for name in FOLDERS for path in (PROJECT / name).rglob("*")]
    names = {path.name for path in [*PROJECT.iterdir(), *inside]}
    catalog = "".join(f.read_text() for f in (PROJECT / "conf").rglob("catalog*.yml"))
    missing = []
    for path in DOCUMENTS:
        for line in fences_and_prose(path)[1]:
            for target in re.findall(r"\]\(([^)#]+)[^)]*\)", line.text):
                if "://" not in target and not (path.parent / target).exists():
                    missing.append((line.place, target))
        for span in spans(path):
            if span.text.startswith(WRITTEN_BY_A_RUN) or not re.fullmatch(
                r"[\w./-]+\.(py|ipynb|md|sh|toml|lock)", span.text
            ):
                continue
            near = [PROJECT, path.parent, PROJECT / "src/flatout", PROJECT / "conf"]
            known = any((folder / span.text).exists() for folder in near)
            written = f"/{span.text}" in catalog
            if not known and not written and Path(span.text).name not in names:
                missing.append((span.place, span.text))
    assert missing == []


def test_every_message_that_is_explained_is_one_of_the_code():
    shown = [cell for path in DOCUMENTS for cell in table_cells(path, "message")]
    assert len(shown) > 20
    known = sentences_of_the_code()
    assert [
        (cell.place, cell.text)
        for cell in shown
        if not any(cell.text.strip("`") in sentence for sentence in known)
    ] == []


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipelines_page_names_what_it_reads_and_writes(name):
    bootstrap_project(PROJECT)
    pipelines.set_requested(None)
    page = PROJECT / "docs" / "pipelines" / f"{name}.md"
    text = "\n".join(line.text for line in fences_and_prose(page)[1])
    read = {entry.removeprefix("params:") for entry in pipelines[name].inputs()}
    written = pipelines[name].all_outputs()
    assert {entry for entry in read | written if f"`{entry}" not in text} == set()
    for header, entries in (("input", read), ("output", written)):
        cells = " ".join(cell.text for cell in table_cells(page, header))
        named = re.findall(r"`([a-z_]+)`", cells)
        assert {*named} - entries <= OF_HOOKS.get(name, set())


def test_every_pipeline_has_a_page():
    assert {*PIPELINES} == {*pipelines} - {"__default__"}


def test_pages_beside_the_code_are_stubs():
    stubs = (PROJECT / "src").rglob("pipelines/*/README.md")
    engine = PROJECT / "src/flatout/engine/README.md"
    for page in [*stubs, engine]:
        assert len(page.read_text().splitlines()) <= 3, page


def test_every_file_of_conf_is_in_its_page():
    conf = PROJECT / "conf"
    text = (conf / "README.md").read_text()
    files = [*conf.glob("base/*.yml"), conf / "logging.yml"]
    names = [file.relative_to(conf).as_posix() for file in files]
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_the_changelog_knows_this_version():
    text = (PROJECT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert versions[1] == flatout.__version__
    kinds = set(re.findall(r"^### (\w+)", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_both_readmes_have_the_same_commands_and_figures():
    english, korean = PROJECT / "README.md", PROJECT / "README.ko.md"

    def plain(path: Path) -> list[list[str]]:
        return [shlex.split(c.text, comments=True) for c in fenced_commands(path)]

    def named(path: Path) -> list[str]:
        return [span.text for span in spans(path) if span in commands(path)]

    def blocks(path: Path) -> list[list[str]]:
        fences = [f for f in fences_and_prose(path)[0] if f.language == "yaml"]
        return [[line.text.split(" #")[0] for line in f.lines] for f in fences]

    def figures(path: Path) -> list[list[str]]:
        rows = [line.text for line in fences_and_prose(path)[1]]
        table = [row for row in rows if row.startswith("|")]
        return [re.findall(r"\d[\d.,:]*", row) for row in table]

    for part in (plain, named, blocks, figures):
        assert part(korean) == part(english), part.__name__


def test_the_tests_that_documents_name_are_there():
    found = [
        (span, match)
        for path in DOCUMENTS
        for span in spans(path)
        if (match := re.fullmatch(r"(test_\w+\.py)(?:::(test_\w+)(\*?))?", span.text))
    ]
    assert len(found) > 20
    for span, match in found:
        (file,) = (PROJECT / "tests").rglob(match[1])
        name = match[2] or "test_"
        definition = f"def {name}(" if match[2] and not match[3] else f"def {name}"
        assert definition in file.read_text(), f"{span.place}: {span.text}"


ROWS_OF_GUIDES = {"A": 25, "B": 21, "C": 32, "D": 31, "E": 22}


def test_every_row_of_the_guides_is_answered():
    text = (PROJECT / "docs/five_guides.md").read_text()
    rows = re.findall(r"^\| ([A-E]\d+) \| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    expected = [
        f"{g}{n + 1}" for g, most in ROWS_OF_GUIDES.items() for n in range(most)
    ]
    assert [row[0] for row in rows] == expected
    assert all(advice.strip() and here.strip() for _, advice, here in rows)
