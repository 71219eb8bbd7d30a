"""The command `push`, which uploads a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from kedro.framework.cli.utils import env_option

from flatout.cli.groups import PARAMS, context_of, flatout, plain_errors
from flatout.project.config_loader import credentials_of, loader_of
from flatout.project.parameters.table import as_params


@flatout.command()
@click.argument("repository")
@env_option
@PARAMS
@click.option("--dry-run", is_flag=True, help="Only write the card and list the files.")
@click.option("--public", is_flag=True, help="Make a new repository public.")
@click.option("--force", is_flag=True, help="Replace the content of the repository.")
def push(
    repository: str, env: str | None, params: dict[str, Any], dry_run: bool, **how: bool
) -> None:
    """Upload the saved model with a model card to REPOSITORY (owner/name) on the Hub.

    Accepts the options of the training run. New repositories are private.
    """
    with plain_errors():
        context = context_of(env, params)
        # The context has set variables that PyTorch reads when it is imported.
        from flatout.engine.export.hub import files_of, push, write_card

        reporting = Path(loader_of(context).settings.paths.metrics).parent
        folder = context.catalog["model"].path
        command = ["kedro", "run", *([f"--env={env}"] if env else [])]
        command += [f"--params={given}"] if (given := as_params(params)) else []
        write_card(folder, repository, reporting, command)
        if dry_run:
            for name, path in files_of(folder).items():
                click.echo(f"{path.stat().st_size:>13,} {name}")
            return
        hub = credentials_of(context, "hub")
        click.echo(push(folder, repository, hub.get("token"), **how))
