"""A database of trials that is listed by plain rows.

Optuna lists it by an object of SQLAlchemy for every row, which is most of the time that
10,000 trials take. Tables and what is made of their rows are Optuna's own.
"""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sql
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState

TRIALS = models.TrialModel.__table__
PARTS = {
    "params": models.TrialParamModel.__table__,
    "values": models.TrialValueModel.__table__,
    "user_attributes": models.TrialUserAttributeModel.__table__,
    "system_attributes": models.TrialSystemAttributeModel.__table__,
    "intermediate_values": models.TrialIntermediateValueModel.__table__,
}
"""What a trial has several of, each in a table of its own."""


class PlainRows(RDBStorage):  # type: ignore[misc]
    """A query a table, where Optuna asks for each 500 trials."""

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        """In the order of their ids: those above the one named, and of those below it
        the included ones."""
        wanted = sql.and_(
            TRIALS.c.study_id == study_id,
            sql.or_(
                TRIALS.c.trial_id > trial_id_greater_than,
                TRIALS.c.trial_id.in_(sorted(included_trial_ids)),
            ),
        )
        with self.engine.connect() as connection:
            # Trials come first: one that has ended has all of its parts by then.
            heads = connection.execute(sql.select(TRIALS).where(wanted)).all()
            found = {head.trial_id: _with_parts(head) for head in heads}
            for name, table in PARTS.items():
                rows = sql.select(table).join(TRIALS).where(wanted)
                for row in connection.execute(rows):
                    if row.trial_id in found:
                        getattr(found[row.trial_id], name).append(row)
        return [
            self._build_frozen_trial_from_trial_model(found[trial_id])
            for trial_id in sorted(found)
            if states is None or found[trial_id].state in states
        ]


def _with_parts(head: Any) -> SimpleNamespace:
    """A row of TRIALS as Optuna's model of it."""
    return SimpleNamespace(
        trial_id=head.trial_id,
        number=head.number,
        state=head.state,
        datetime_start=_local(head.datetime_start),
        datetime_complete=_local(head.datetime_complete),
        **{name: [] for name in PARTS},
    )


def _local(moment: datetime | None) -> datetime | None:
    """Tables hold UTC, trials the time of here, both without saying so."""
    if moment is None:
        return None
    return moment.replace(tzinfo=timezone.utc).astimezone().replace(tzinfo=None)
