"""Compiled code in a file: taken whole where it belongs, refused in words elsewhere.
`test_late_compile.py` trains with graphs that were carried."""

from __future__ import annotations

import json
import zipfile

import pytest
from click.testing import CliRunner

from flatout.cli import cli
from flatout.engine.models import carried_cache
from flatout.engine.models.carried_cache import (
    CacheFileError,
    export_cache,
    import_cache,
    made_by,
)

FILES = {
    "inductor/fxgraph/ab/key/graph": b"\x80graph",
    "inductor/ab/code.py": b"print()",
    "triton/KERNEL/kernel.cubin": b"cubin",
}


def use(monkeypatch, folder):
    """`folder` as this machine's caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def caches(tmp_path, monkeypatch):
    here = tmp_path / "here"
    group = here / "triton" / "KERNEL" / "__grp__kernel.json"
    for name, content in FILES.items():
        path = here / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    paths = {"kernel.cubin": str(group.with_name("kernel.cubin"))}
    group.write_text(json.dumps({"child_paths": paths}))
    for passing in ("inductor/locks/a.lock", "triton/KERNEL/tmp.pid_1/kernel.ptx"):
        (here / passing).parent.mkdir(parents=True)
        (here / passing).write_text("of a running process")
    (here / "inductor" / "ab" / "secret").symlink_to("/etc/hostname")
    use(monkeypatch, here)
    return tmp_path


def test_what_is_exported_lies_in_the_other_folders_after_the_import(
    caches, monkeypatch
):
    file = caches / "out" / "compiled.zip"
    assert export_cache(file).files == 4
    there = caches / "there"
    use(monkeypatch, there)
    taken = import_cache(file)
    found = contents(there)
    group = json.loads(found.pop("triton/KERNEL/__grp__kernel.json"))
    assert (taken.files, found) == (4, FILES)
    kernel = there / "triton" / "KERNEL" / "kernel.cubin"
    assert group == {"child_paths": {"kernel.cubin": str(kernel)}}


def test_what_lies_there_already_stays(caches, monkeypatch):
    file, name = caches / "compiled.zip", "inductor/ab/code.py"
    export_cache(file)
    use(monkeypatch, caches / "there")
    mine = caches / "there" / name
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    assert import_cache(file).files == 3
    assert mine.read_bytes() == b"mine"
    assert import_cache(file).files == 0


def test_an_empty_cache_is_told_of(tmp_path, monkeypatch):
    use(monkeypatch, tmp_path / "nothing")
    with pytest.raises(CacheFileError, match=r"nothing is compiled in .*train once"):
        export_cache(tmp_path / "compiled.zip")
    assert not (tmp_path / "compiled.zip").exists()


def forged(file, out, *, files=None, change=None):
    """`file` again with other `files` by name, under a table that names them."""
    with zipfile.ZipFile(file) as opened:
        manifest = json.loads(opened.read("manifest.json"))
        kept = {n: opened.read(n) for n in manifest["files"]}
    if files:
        digest = carried_cache._digest
        kept = files
        manifest["files"] = {n: [len(c), digest(c)] for n, c in files.items()}
    (change or (lambda _: None))(manifest)
    with zipfile.ZipFile(out, "w") as opened:
        for name, content in kept.items():
            opened.writestr(name, content)
        opened.writestr("manifest.json", json.dumps(manifest))
    return out


@pytest.mark.parametrize(
    "name",
    [
        "inductor/../../outside",
        "/etc/flatout",
        "inductor//etc/flatout",
        "other/file",
        "inductor",
        "inductor/link/file",
        "inductor\\..\\outside",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(caches, monkeypatch, name):
    file = caches / "compiled.zip"
    export_cache(file)
    there = caches / "there"
    use(monkeypatch, there)
    (there / "inductor").mkdir(parents=True)
    (there / "inductor" / "link").symlink_to(caches / "elsewhere")
    bad = forged(file, caches / "bad.zip", files={"inductor/good": b"1", name: b"2"})
    if name == "inductor//etc/flatout":  # one slash too many leads nowhere
        assert import_cache(bad).files == 2
        return
    with pytest.raises(CacheFileError, match=r"Nothing of it was taken"):
        import_cache(bad)
    assert contents(there) == {}
    assert not (caches / "elsewhere").exists() and not (caches / "outside").exists()


def test_a_file_that_is_torn_is_refused(caches, monkeypatch):
    file = caches / "compiled.zip"
    export_cache(file)
    use(monkeypatch, caches / "there")
    content = file.read_bytes()
    graph = (
        content.index(b"\x80graph"[:1] + b"graph") if b"\x80graph" in content else 60
    )
    flipped = bytearray(content)
    flipped[graph + 1] ^= 1
    extra = forged(
        file,
        caches / "extra.zip",
        change=lambda m: m["files"].pop("inductor/ab/code.py"),
    )
    sizes = forged(
        file,
        caches / "sizes.zip",
        change=lambda m: m["files"]["inductor/ab/code.py"].__setitem__(0, 3),
    )
    for number, torn in enumerate(
        [content[:-40], content[: len(content) // 2], b"", b"text", bytes(flipped)]
    ):
        (caches / f"{number}.zip").write_bytes(torn)
    for bad in (*(caches / f"{number}.zip" for number in range(5)), extra, sizes):
        with pytest.raises(CacheFileError, match=r"torn, or no file of .*export"):
            import_cache(bad)
    assert not (caches / "there").exists()


def test_any_bit_that_is_flipped_is_told_of(caches, monkeypatch):
    """Deflated bytes that make no sense, a table that is no table: never a traceback.
    Those in a header that nobody reads change nothing."""
    (caches / "here" / "inductor" / "ab" / "code.py").write_text("x = 1\n" * 40)
    export_cache(caches / "compiled.zip")
    content, faults = (caches / "compiled.zip").read_bytes(), 0
    for at in range(0, len(content), 3):
        use(monkeypatch, caches / f"there-{at}")
        flipped = bytearray(content)
        flipped[at] ^= 0xFF
        (caches / "flipped.zip").write_bytes(flipped)
        try:
            import_cache(caches / "flipped.zip")
        except CacheFileError:
            faults += 1
            assert contents(caches / f"there-{at}") == {}
    assert faults > len(content) / 6


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(made_by=[]),
        lambda m: m.update(files=list(m["files"])),
        lambda m: m["files"].update({"inductor/ab/code.py": 7}),
    ],
    ids=["versions", "files", "sizes"],
)
def test_a_table_of_another_form_is_refused(caches, monkeypatch, change):
    export_cache(caches / "compiled.zip")
    use(monkeypatch, caches / "there")
    bad = forged(caches / "compiled.zip", caches / "bad.zip", change=change)
    with pytest.raises(CacheFileError, match=r"torn, or no file of .*export"):
        import_cache(bad)


def test_a_torn_table_of_triton_is_refused_before_anything_is_taken(
    caches, monkeypatch
):
    export_cache(caches / "compiled.zip")
    use(monkeypatch, caches / "there")
    files = {"inductor/good": b"1", "triton/KERNEL/__grp__kernel.json": b"[]"}
    bad = forged(caches / "compiled.zip", caches / "bad.zip", files=files)
    with pytest.raises(CacheFileError, match=r"Nothing of it was taken"):
        import_cache(bad)
    assert contents(caches / "there") == {}


@pytest.mark.parametrize("what", ["torch", "triton", "device", "flatout's kernels"])
def test_a_file_of_other_versions_is_refused(caches, monkeypatch, what):
    file = caches / "compiled.zip"
    export_cache(file)
    use(monkeypatch, caches / "there")
    other = forged(
        file, caches / "o.zip", change=lambda m: m["made_by"].update({what: "another"})
    )
    told = f"made with {what} another \\(here {made_by()[what][:8]}"
    with pytest.raises(CacheFileError, match=told.replace("+", r"\+")):
        import_cache(other)
    assert not (caches / "there").exists()


@pytest.mark.parametrize(
    ("library", "is_taken"),
    [
        ("inductor/ab/code.so", False),
        ("inductor/triton/0/KERNEL/launcher.so", True),
        ("triton/KERNEL/launcher.so", True),
    ],
)
def test_code_that_was_built_for_another_cpu_is_refused(
    caches, monkeypatch, library, is_taken
):
    """One of the same name that hides instructions, say; what a GPU runs may come."""
    (caches / "here" / library).parent.mkdir(parents=True, exist_ok=True)
    (caches / "here" / library).write_bytes(b"library")
    export_cache(caches / "compiled.zip")
    use(monkeypatch, caches / "there")
    found = carried_cache.cpu_instructions()
    monkeypatch.setattr(carried_cache, "cpu_instructions", lambda: found[1:])
    if is_taken:
        assert import_cache(caches / "compiled.zip").files == 5
        return
    with pytest.raises(CacheFileError, match=r"made with CPU .* with instructions"):
        import_cache(caches / "compiled.zip")
    assert not (caches / "there").exists()


def test_the_commands(caches, monkeypatch):
    file, run = str(caches / "compiled.zip"), CliRunner().invoke
    written = run(cli, ["flatout", "compile-cache", "export", file])
    assert (written.exit_code, "4 files" in written.output) == (0, True)
    use(monkeypatch, caches / "there")
    taken = run(cli, ["flatout", "compile-cache", "import", file])
    assert (taken.exit_code, "4 files taken" in taken.output) == (0, True)
    (caches / "compiled.zip").write_bytes(b"text")
    refused = run(cli, ["flatout", "compile-cache", "import", file])
    assert (refused.exit_code, "torn" in refused.output) == (2, True)
    use(monkeypatch, caches / "empty")
    empty = run(cli, ["flatout", "compile-cache", "export", file])
    assert (empty.exit_code, "train once" in empty.output) == (2, True)
