"""Raw texts in a store are downloaded once, and again only if they have changed."""

from functools import partial
from http.server import SimpleHTTPRequestHandler

import fsspec
import pytest
from kedro.io import DatasetError

from flatout.datasets import TextFiles
from tests.servers import serving

CSV = b"text,label\nfirst,a\nsecond,b\n"


@pytest.fixture
def store():
    """A store in memory. A file's stamp is the time when it was written."""
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def texts(raw) -> list[str]:
    batches = raw.batches(["text"])
    return [text for b in batches for text in b.columns["text"].to_pylist()]


def of(url, folder, **options):
    return TextFiles(filepath=url, cache_dir=str(folder), **options)


def test_a_url_reads_as_the_copied_file_does(store, tmp_path):
    store.pipe_file("/bucket/reviews.csv", CSV)
    (tmp_path / "reviews.csv").write_bytes(CSV)
    here = TextFiles(filepath=str(tmp_path / "reviews.csv")).load()
    there = of("memory://bucket/reviews.csv", tmp_path / "fetched").load()
    assert texts(there) == texts(here) == ["first", "second"]
    assert there.digest(["text"]) == here.digest(["text"])


def test_only_what_has_changed_is_fetched_again(store, tmp_path, caplog):
    for name in ("a.csv", "deep/b.csv", "deep/c.csv", "_SUCCESS", "notes.txt"):
        store.pipe_file(f"/bucket/{name}", CSV.replace(b"first", name.encode()))
    entry = of("memory://bucket/", tmp_path)
    caplog.set_level("INFO", "flatout")

    def fetched():
        caplog.clear()
        raw = entry.load()
        return texts(raw), [record.args[0] for record in caplog.records]

    before = ["a.csv", "second", "deep/b.csv", "second", "deep/c.csv", "second"]
    shards = [f"memory:///bucket/{name}" for name in ("a.csv", "deep/b.csv")]
    assert fetched() == (before, [*shards, "memory:///bucket/deep/c.csv"])
    assert fetched() == (before, [])
    store.pipe_file("/bucket/deep/b.csv", CSV.replace(b"first", b"other"))
    store.rm("/bucket/deep/c.csv")
    assert fetched() == (["a.csv", "second", "other", "second"], [shards[1]])
    next(tmp_path.glob("*/a.csv")).unlink()
    assert fetched()[1] == shards[:1]


def test_a_fetch_that_fails_leaves_no_part_of_a_file(store, tmp_path, monkeypatch):
    store.pipe_file("/bucket/a.csv", CSV)

    def breaks(self, path, local, **_):
        open(local, "wb").write(CSV[:5])
        raise ConnectionResetError("gone")

    monkeypatch.setattr(type(store), "get_file", breaks)
    with pytest.raises(DatasetError, match=r"memory://bucket/a\.csv cannot be fetched"):
        of("memory://bucket/a.csv", tmp_path).load()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_nothing_there_and_a_missing_package_say_so(store, tmp_path):
    store.pipe_file("/bucket/readme.md", b"#")
    with pytest.raises(DatasetError, match=r"has no texts; found: readme\.md"):
        of("memory://bucket/", tmp_path).load()
    with pytest.raises(DatasetError, match="has no texts; found: nothing"):
        of("memory://else/a.csv", tmp_path).load()
    with pytest.raises(DatasetError, match=r"gs://b/a\.csv cannot be .* gcsfs"):
        of("gs://b/a.csv", tmp_path).load()
    with pytest.raises(DatasetError, match="Protocol not known: cloud"):
        of("cloud://b/a.csv", tmp_path).load()


def test_over_http_with_options_of_the_store(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served/a.csv").write_bytes(CSV)
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append((self.command, self.headers["X-Token"]))

    handler = partial(Handler, directory=str(tmp_path / "served"))
    with serving(handler) as server:
        key = {"client_kwargs": {"headers": {"X-Token": "t"}}}
        url = f"{server}/a.csv?version=1"
        entry = of(url, tmp_path / "fetched", credentials=key)
        assert texts(entry.load()) == texts(entry.load()) == ["first", "second"]
    assert {token for _, token in asked} == {"t"}
    assert [command for command, _ in asked].count("GET") == 1


def test_no_message_shows_what_a_signed_address_carries(tmp_path):
    url = "http://me:pass@127.0.0.1:9/a.csv?sig=secret"
    with pytest.raises(DatasetError) as refused:
        of(url, tmp_path).load()
    nothing = "http://127.0.0.1:9/a.csv has no texts; found: nothing: check"
    assert nothing in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "pass" not in str(refused.value)
    assert "secret" not in str(of(url, tmp_path))
