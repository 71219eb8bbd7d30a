# ruff: noqa: T201
"""DeepLog's log-key model as public implementations write it, to be measured beside
`kedro run --env=deeplog`: windows of 10 keys, batches of 2,048 of them, Adam, a key as
one number, and top-g detection.

The folder holds the sessions of a public DeepLog repository (a session a line):
`hdfs_train`, all normal, and `hdfs_test_abnormal`; `hdfs_test_normal` where it is
there. Without it the normal sessions to be judged are a part of `hdfs_train` that is
not trained on, the same as `part: rest` of flatout.datasets.LogSessions.

    python -m tests.tools.deeplog_plain --folder=/data/hdfs --epochs=30

With `--turns` both sides train by turns, `--epochs` and `--flatout-epochs` long; with
`--turns 0` the loop alone, with `--epochs 0` flatout alone. `--device cuda` puts the
loop on a GPU, `--data-on-device` its windows too.

    python -m tests.tools.deeplog_plain --folder=/data/hdfs --epochs=0 --turns=1 \
        --params=model.config.window_keys=10,runtime.seed=1
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from flatout.engine.data.sessions.log_sessions import LogSessions
from flatout.engine.data.sessions.parts import Deal

WINDOW, HIDDEN, LAYERS = 10, 64, 2
Session = tuple[int, ...]


class Model(nn.Module):
    """(B, 10, 1) numbers of keys -> (B, keys)."""

    def __init__(self, num_keys: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, HIDDEN, LAYERS, batch_first=True)
        self.fc = nn.Linear(HIDDEN, num_keys)

    def forward(self, windows: Tensor) -> Tensor:
        return self.fc(self.lstm(windows)[0][:, -1])


def sessions_of(path: Path, part: str) -> list[Session]:
    """Keys from 0."""
    reader = LogSessions(path, deal=Deal(part))
    texts = [
        text
        for batch in reader.batches(["text"])
        for text in batch.columns["text"].to_pylist()
    ]
    return [tuple(int(key) - 1 for key in text.split()) for text in texts]


def windows_of(sessions: list[Session]) -> tuple[Tensor, Tensor]:
    """(N, 10, 1) float and (N,) what follows each."""
    pairs = [
        (session[at : at + WINDOW], session[at + WINDOW])
        for session in sessions
        for at in range(len(session) - WINDOW)
    ]
    windows, following = zip(*pairs, strict=True)
    return torch.tensor(windows).float().unsqueeze(-1), torch.tensor(following)


class OnDevice:
    """Batches of windows that lie on the device already."""

    def __init__(self, data: tuple[Tensor, Tensor], batch: int) -> None:
        self.data, self.batch = data, batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        windows, following = self.data
        for rows in torch.randperm(len(windows), device=windows.device).split(
            self.batch
        ):
            yield windows[rows], following[rows]

    def __len__(self) -> int:
        return math.ceil(len(self.data[0]) / self.batch)


def train(
    model: Model, sessions: list[Session], given: argparse.Namespace
) -> tuple[float, float]:
    """Windows/s behind the first epoch, and seconds in all."""
    windows, following = windows_of(sessions)
    loader: Any = OnDevice(
        (windows.to(given.device), following.to(given.device)), given.batch
    )
    if not given.data_on_device:
        data = torch.utils.data.TensorDataset(windows, following)
        loader = torch.utils.data.DataLoader(data, given.batch, shuffle=True)
    epochs = given.epochs
    optimizer, begin = torch.optim.Adam(model.parameters()), time.perf_counter()
    warm = begin
    for epoch in range(epochs):
        total = 0.0
        for rows in loader:
            inputs, labels = (own.to(given.device) for own in rows)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if epoch == 0:
            warm = time.perf_counter()
        print(f"epoch {epoch + 1} loss {total / len(loader):.4f}", flush=True)
    end = time.perf_counter()
    rate = len(windows) * (epochs - 1) / max(end - warm, 1e-9)
    return rate, end - begin


@torch.no_grad()
def alarms(model: Model, sessions: list[Session], top_keys: int, known: int) -> int:
    """Sessions with a key that is none of the likeliest; short ones are filled up with
    a key that is never likely, as the public implementations do."""
    count, device = 0, next(model.parameters()).device
    for session, times in Counter(sessions).items():
        filled = session + (-1,) * (WINDOW + 1 - len(session))
        windows, following = (own.to(device) for own in windows_of([filled]))
        likeliest = model(windows).topk(min(top_keys, known)).indices
        right = (likeliest == following.unsqueeze(1)).any(1)
        count += times * (not bool(right.all()))
    return count


def plain(given: argparse.Namespace) -> float:
    """Train and judge; windows/s."""
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    whole = given.folder / "hdfs_test_normal"
    parts = ("all", "all") if whole.is_file() else ("train", "rest")
    train_file = given.folder / "hdfs_train"
    normal = whole if whole.is_file() else train_file
    known = sessions_of(train_file, parts[0])
    num_keys = 1 + max(max(session) for session in known)
    model = Model(num_keys).to(given.device)
    rate, seconds = train(model, known, given)
    print(f"plain: {len(known)} sessions, {rate:,.0f} next keys/s, {seconds:.1f} s")
    judged = [
        sessions_of(normal, parts[1]),
        sessions_of(given.folder / "hdfs_test_abnormal", "all"),
    ]
    model.eval()
    for top_keys in range(1, given.top_keys + 5):
        found = [alarms(model, own, top_keys, num_keys) for own in judged]
        _tell(top_keys, found, [len(own) for own in judged])
    return rate


def flatout(given: argparse.Namespace) -> float:
    """The same by `kedro run --env=deeplog` on these sessions; next keys/s."""
    whole = given.folder / "hdfs_test_normal"
    train_file, held_out = given.folder / "hdfs_train", not whole.is_file()
    normal = train_file if held_out else whole
    of_train = {"filepath": str(train_file), "part": "train" if held_out else "all"}
    judged = {
        "filepath": str(normal),
        "abnormal_filepath": str(given.folder / "hdfs_test_abnormal"),
        "part": "rest" if held_out else "all",
    }
    with tempfile.TemporaryDirectory() as name:
        return _by_kedro(Path(name), of_train, judged, given)


def _by_kedro(
    folder: Path,
    of_train: dict[str, Any],
    judged: dict[str, Any],
    given: argparse.Namespace,
) -> float:
    kind = {"type": "flatout.datasets.LogSessions"}
    entries = {"raw_texts": kind | of_train, "detect_sessions": kind | judged}
    shutil.copytree("conf", folder / "conf", ignore=shutil.ignore_patterns("local"))
    (folder / "conf/local").mkdir()
    (folder / "conf/deeplog/catalog.yml").write_text(yaml.dump(entries))
    params = f"data_dir={folder / 'data'},runtime.threads={given.threads}"
    params += f",{given.params}" if given.params else ""
    params += f",train.epochs={given.flatout_epochs}" if given.flatout_epochs else ""
    command = [sys.executable, "-m", "kedro", "run", "--env=deeplog"]
    command += [f"--conf-source={folder / 'conf'}", f"--params={params}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    reports = folder / "data/08_reporting"
    report = json.loads((reports / "train_report.json").read_text())
    found = json.loads((reports / "detection_report.json").read_text())
    # A session of n keys is n + 2 tokens, of which n + 1 are predicted.
    rate = report["tokens_per_s"] - report["samples_per_s"]
    print(f"flatout: {rate:,.0f} next keys/s, {report['train_wall_s']:.1f} s")
    for own in found["by_top_keys"][: given.top_keys + 4]:
        alarms = [own["false_alarms"], own["true_alarms"]]
        totals = [alarms[0] + own["rightly_silent"], alarms[1] + own["missed"]]
        _tell(own["top_keys"], alarms, totals)
    return float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--top-keys", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--flatout-epochs", type=int)
    parser.add_argument("--batch", type=int, default=2048, help="windows, the loop's")
    parser.add_argument("--device", default="cpu", help="the loop's")
    parser.add_argument("--data-on-device", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="the loop's")
    parser.add_argument("--params", help="more of flatout's, as kedro run takes them")
    given = parser.parse_args()
    if not given.turns:
        plain(given)
        return
    if not given.epochs:
        for _ in range(given.turns):
            flatout(given)
        return
    ratios = [(1 / plain(given)) * flatout(given) for _ in range(given.turns)]
    print(f"ratios of rates {ratios}, median {statistics.median(ratios):.2f}")


def _tell(top_keys: int, found: list[int], totals: list[int]) -> None:
    wrong, right = found
    precision, recall = right / max(1, right + wrong), right / totals[1]
    f1 = 2 * precision * recall / max(1e-9, precision + recall)
    print(
        f"g {top_keys}: precision {precision:.4f} recall {recall:.4f} f1 {f1:.4f}; "
        f"{wrong} of {totals[0]} normal sessions are false alarms"
    )


if __name__ == "__main__":
    main()
