# ruff: noqa: T201
"""DeepLog's log-key model as public implementations write it, to be measured beside
`kedro run --env=deeplog`: windows of 10 keys, batches of 2,048 of them, Adam, a key as
one number, and top-g detection.

The folder holds the sessions of a public DeepLog repository (a session a line):
`hdfs_train`, all normal, and `hdfs_test_abnormal`; `hdfs_test_normal` where it is
there. Without it the normal sessions to be judged are a part of `hdfs_train` that is
not trained on, the same as `part: rest` of flatout.datasets.LogSessions.

    python -m tests.tools.deeplog_plain --folder=/data/hdfs --epochs=30
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

from flatout.engine.data.sessions.log_sessions import LogSessions
from flatout.engine.data.sessions.parts import Deal

WINDOW, BATCH, HIDDEN, LAYERS = 10, 2048, 64, 2
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


def train(model: Model, sessions: list[Session], epochs: int) -> tuple[float, float]:
    """Windows/s behind the first epoch, and seconds in all."""
    windows, following = windows_of(sessions)
    data = torch.utils.data.TensorDataset(windows, following)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    optimizer, begin = torch.optim.Adam(model.parameters()), time.perf_counter()
    warm = begin
    for epoch in range(epochs):
        total = 0.0
        for inputs, labels in loader:
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
    count = 0
    for session, times in Counter(sessions).items():
        filled = session + (-1,) * (WINDOW + 1 - len(session))
        windows, following = windows_of([filled])
        likeliest = model(windows).topk(min(top_keys, known)).indices
        right = (likeliest == following.unsqueeze(1)).any(1)
        count += times * (not bool(right.all()))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--top-keys", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    whole = given.folder / "hdfs_test_normal"
    parts = ("all", "all") if whole.is_file() else ("train", "rest")
    train_file = given.folder / "hdfs_train"
    normal = whole if whole.is_file() else train_file
    known = sessions_of(train_file, parts[0])
    num_keys = 1 + max(max(session) for session in known)
    model = Model(num_keys)
    rate, seconds = train(model, known, given.epochs)
    print(f"{len(known)} sessions, {rate:,.0f} windows/s, {seconds:.1f} s")
    judged = [
        (sessions_of(normal, parts[1]), False),
        (sessions_of(given.folder / "hdfs_test_abnormal", "all"), True),
    ]
    model.eval()
    for top_keys in range(1, given.top_keys + 5):
        found = [alarms(model, own, top_keys, num_keys) for own, _ in judged]
        _tell(top_keys, found, [len(own) for own, _ in judged])


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
