"""Upload a saved model with a model card to the Hugging Face Hub."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError

from flatout.engine.files.atomic_write import write_text
from flatout.engine.files.calibration import Calibration
from flatout.engine.models.building import ModelError
from flatout.engine.models.trained_rows import TrainedRows
from flatout.engine.parameters.faults import first_line
from flatout.engine.parameters.secrets import without_password
from flatout.engine.tasks import task_class

MARK = "<!-- flatout writes this card again, unless this line is removed -->"
SPEED = ("device", "precision", "steps", "global_batch_size", "versions")


def write_card(folder: Path, name: str, reporting: Path, command: list[str]) -> None:
    """Write the card of the model in `folder`. The card shows `command`, without
    passwords. A card without MARK was not written by flatout, so it is not replaced.
    Reports in `reporting` that are older than the model are ignored. Raises ModelError
    if flatout did not train the model."""
    path, card = folder / "config.json", folder / "README.md"
    if not path.is_file():
        raise ModelError(f"{folder} has no model to push: train one (kedro run)")
    if card.is_file() and MARK not in card.read_text(encoding="utf-8"):
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if "flatout_task" not in config:
        raise ModelError(
            f"{folder} has a model of another tool: push it with `hf upload`"
        )

    def report(name: str) -> dict[str, Any]:
        file = reporting / f"{name}_report.json"
        is_new = file.is_file() and file.stat().st_mtime >= path.stat().st_mtime
        return json.loads(file.read_text(encoding="utf-8")) if is_new else {}

    trained, evaluated, exported = map(report, ("train", "evaluation", "export"))
    rows, fitted = TrainedRows.read(folder), Calibration.read(folder)
    speed = [f"samples_per_s {trained.get('samples_per_s', 0):,.1f}"]
    speed += [f"{n} {trained[n]}" for n in SPEED if n in trained]
    lines = [
        f"Task: {config['flatout_task']}, with a model of type {config['model_type']}.",
        f"Data: {rows.num_rows:,} train rows, key `{rows.key}`." if rows else "",
        _figures(evaluated, reporting),
        f"Calibration: temperature {fitted.temperature:.4g}, "
        f"thresholds {fitted.thresholds or 'not fitted'}",
        f"Training: {', '.join(speed)}" if trained else "",
        f"Export: {exported['pick']}, {exported['reason']}" if exported else "",
        f"```bash\n{without_password(shlex.join(command))}\n```",
    ]
    data = ModelCardData(library_name="transformers", tags=["flatout"])
    data.pipeline_tag = task_class(config["flatout_task"]).pipeline_tag
    head = f"---\n{data}\n---\n{MARK}\n# {name}"
    write_text(card, "\n\n".join([head, *filter(None, lines)]) + "\n")


def _figures(evaluated: dict[str, Any], reporting: Path) -> str:
    """Return the figures in `evaluated` as a Markdown table, with 95 % intervals for
    the means over rows (loss, accuracy). Return "" if predictions are missing."""
    known = {n: v for n, v in evaluated.items() if isinstance(v, float)}
    path = reporting.parent / "07_model_output" / "test_predictions.parquet"
    if not known or not path.is_file():
        return ""
    found = pd.read_parquet(path, columns=["loss", "wrong"]).astype(float)
    errors = found.rename(columns={"wrong": "accuracy"}).sem().dropna()
    ends = {name: f"± {1.96 * error:.4f}" for name, error in errors.items()}
    head = ["| {rows:,} {split} rows | | 95 % |".format(**evaluated), "|---|---|---|"]
    lines = [f"| {n} | {v:.4f} | {ends.get(n, '')} |" for n, v in known.items()]
    return "\n".join([*head, *lines])


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files in `folder` that are uploaded, keyed by their paths in the
    repository. Hidden files are left out."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {n: p for n, p in sorted(found.items()) if p.is_file() and n[0] != "."}


def push(folder: Path, repository: str, token: str | None, **options: bool) -> str:
    """Upload `folder` to `repository` in one commit, and return the commit's URL. The
    options are `public` and `force`, which replaces existing content. Raises ModelError
    if there is no token, if the repository has content and `force` is False, or if the
    upload fails."""
    token = token or get_token()
    if not token:
        raise ModelError(
            "push needs a token that may write: set HF_TOKEN, or hub: {token: ...} in "
            "conf/local/credentials.yml (https://huggingface.co/settings/tokens)"
        )
    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=not options["public"], exist_ok=True)
        stored = {*api.list_repo_files(repository)} - {".gitattributes"}
        if stored and not options["force"]:
            raise ModelError(
                f"{repository} has content ({', '.join(sorted(stored)[:3])}): choose "
                "another name, or replace it with --force"
            )
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[*files_of(folder)],
            delete_patterns="*",
            commit_message="Model by flatout",
        )
    except (OSError, HFValidationError) as error:  # network errors are OSErrors
        raise ModelError(
            f"{repository} was not pushed: {first_line(error)}. Check the name, the "
            "token's rights, the network and HF_HUB_OFFLINE"
        ) from error
    return str(done.commit_url)
