"""Upload a saved model with a model card to the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError

from flatout.engine.files.atomic_write import write_text
from flatout.engine.files.calibration import Calibration
from flatout.engine.models.building import ModelError
from flatout.engine.models.trained_rows import TrainedRows
from flatout.engine.parameters.faults import first_line
from flatout.engine.tasks import task_class

CARD, DRAWS = "README.md", 1_000
MARK = "<!-- flatout writes this card again, unless this line is removed -->"
SPEED = ("device", "precision", "steps", "global_batch_size")
ERRORS = ("calibration_error_uncalibrated", "calibration_error")


def write_card(folder: Path, name: str, reporting: Path, command: str) -> None:
    """Write the card of the model in `folder`. The card shows `command`. A card without
    MARK was not written by flatout, so it is not replaced. Reports in `reporting` that
    are older than the model are ignored. Raises ModelError if flatout did not train the
    model."""
    path, card = folder / "config.json", folder / CARD
    if not path.is_file():
        raise ModelError(f"{folder} has no model to push: train one (kedro run)")
    if card.is_file() and MARK not in card.read_text(encoding="utf-8"):
        return
    if not is_own(folder):
        raise ModelError(
            f"{folder} has a model of another tool: push it with `hf upload`"
        )

    def report(name: str) -> dict[str, Any]:
        file = reporting / f"{name}_report.json"
        is_new = file.is_file() and file.stat().st_mtime >= path.stat().st_mtime
        return json.loads(file.read_text(encoding="utf-8")) if is_new else {}

    config = json.loads(path.read_text(encoding="utf-8"))
    trained, evaluated, exported = map(report, ("train", "evaluation", "export"))
    task, rows = task_class(config["flatout_task"]), TrainedRows.read(folder)
    fitted, shown = Calibration.read(folder), [n for n in ERRORS if n in evaluated]
    speed = [f"samples_per_s {trained.get('samples_per_s', 0):,.1f}"]
    speed += [f"{n} {trained[n]}" for n in SPEED if n in trained]
    lines = [
        f"Task: {config['flatout_task']}, with a model of type {config['model_type']}.",
        f"Data: {rows.num_rows:,} train rows, key `{rows.key}`." if rows else "",
        _figures(evaluated, task, reporting),
        f"Calibration: temperature {fitted.temperature:.4g}"
        + (f", thresholds {json.dumps(fitted.thresholds)}" if fitted.thresholds else "")
        + "".join(f", {n} {evaluated[n]:.4f}" for n in shown),
        f"Training: {', '.join(speed)}" if trained else "",
        f"Versions: {json.dumps(trained.get('versions'))}" if trained else "",
        f"Export: {exported['pick']}, {exported['reason']}" if exported else "",
        f"```bash\n{command}\n```",
    ]
    data = ModelCardData(
        library_name="transformers", pipeline_tag=task.pipeline_tag, tags=["flatout"]
    )
    head = f"---\n{data}\n---\n{MARK}\n# {name}"
    write_text(card, "\n\n".join([head, *filter(None, lines)]) + "\n")


def is_own(folder: Path) -> bool:
    """Return whether `folder` contains a model that flatout trained."""
    path = folder / "config.json"
    return path.is_file() and '"flatout_task"' in path.read_text(encoding="utf-8")


def _figures(evaluated: dict[str, Any], task: Any, reporting: Path) -> str:
    """Return the metrics in `evaluated` as a Markdown table, with 95 % intervals for
    the loss and the accuracy. Return "" if predictions are missing."""
    known = {n: v for n in task.figures if isinstance(v := evaluated.get(n), float)}
    path = reporting.parent / "07_model_output" / "test_predictions.parquet"
    if not known or not path.is_file():
        return ""
    found = pd.read_parquet(path, columns=["loss", "wrong"]).astype(float)
    found["accuracy"] = 1 - found.pop("wrong")
    rows, random, ends = found.to_numpy(), np.random.default_rng(0), {}
    if len(rows):  # there are none for language models
        means = [random.choice(rows, len(rows)).mean(0) for _ in range(DRAWS)]
        bounds = np.percentile(means, (2.5, 97.5), axis=0).T
        shown = ("{:.4f} to {:.4f}".format(*both) for both in bounds)
        ends = dict(zip(found, shown, strict=True))
    count = f"{evaluated['rows']:,} {evaluated['split']} rows"
    head = [f"| {count} | | 95 % |", "|---|---|---|"]
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
    api, force = HfApi(token=token), options["force"]
    try:
        there = not force and api.repo_exists(repository)
        stored = api.list_repo_files(repository) if there else []
        if kept := [name for name in stored if name != ".gitattributes"]:
            raise ModelError(
                f"{repository} has content ({', '.join(kept[:3])}): choose another "
                "name, or replace it with --force"
            )
        api.create_repo(repository, private=not options["public"], exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[*files_of(folder)],
            delete_patterns="*" if force else None,
            commit_message="Model by flatout",
        )
    except (OSError, HFValidationError) as error:  # network errors are OSErrors
        raise ModelError(
            f"{repository} was not pushed: {first_line(error)}. Check the name, the "
            "token's rights, the network and HF_HUB_OFFLINE"
        ) from error
    return str(done.commit_url)
