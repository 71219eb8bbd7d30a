"""Export a saved model to other formats, and measure each format on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flatout.engine.export.formats import Exported, Forward, load
from flatout.engine.export.measured import LOSS, Line, Measure
from flatout.engine.files.atomic_write import clear_leftovers, write_folder
from flatout.engine.machine.environment import cpu_name
from flatout.engine.models.building import ModelError
from flatout.engine.parameters.faults import first_line
from flatout.engine.predict.checks import with_calibration
from flatout.engine.predict.split_predictions import SplitPredictions

logger = logging.getLogger(__name__)


@torch.no_grad()
def export(found: SplitPredictions) -> dict[str, Any]:
    """Export the model of `found` to all of `export.formats`, measure them on the rows
    of `found`, and return a report. The predictor must pad rows. Raises ModelError if
    no format can store the model, and SettingsError if the settings do not fit it."""
    plain, wanted = deepcopy(found.model).cpu().eval(), found.settings.export
    plain.config.use_cache = False
    predictor, rows, _ = found.opened
    forward = Forward(plain, with_calibration(predictor.task, found.model))
    measure = Measure(predictor, rows, forward)
    exported = Exported(forward, measure.example, predictor)
    weights = sum(weight.nbytes for weight in plain.parameters())
    lines = [measure.line("pytorch", lambda: forward, weights)]

    def fill(name: str, folder: Path) -> None:
        exported.save(name, folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        exported.describe(name, folder)
        lines.append(measure.line(name, partial(load, name, folder), size))

    clear_leftovers(Path(wanted.folder))
    for name in wanted.formats:
        if fault := _fault(Path(wanted.folder, name), partial(fill, name)):
            logger.warning("%s: %s", name, fault)
            lines.append({"format": name, "fault": fault})
        else:
            told = "%(format)s: %(size_mib).1f MiB, loads in %(load_s).1f s"
            logger.info(told, lines[-1])
    good = [line for line in lines if not line["fault"]]
    if len(good) == 1:
        faults = "; ".join(f"{one['format']}: {one['fault']}" for one in lines[1:])
        raise ModelError(f"export: no format can store this model. {faults}")
    return {
        "task": predictor.task.settings.task,
        "rows": len(rows),
        "figure": measure.name,
        "device": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "formats": lines,
        **_pick(good, measure.name),
    }


def _fault(target: Path, fill: Callable[[Path], None]) -> str | None:
    """Let `fill` write the folder `target` of a format. Return None, or the reason if
    the format cannot store the model. Raises OSError if the disk fails."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # exporters mention packages that are not needed
    try:
        write_folder(target, fill)
    except ImportError as error:
        return f"{error}: pip install 'flatout[export]', or change export.formats"
    except OSError:  # such as a full disk
        raise
    except Exception as error:  # each exporter fails in its own way
        return f"it cannot store this model ({first_line(error)})"
    finally:
        logging.disable(before)
    return None


def _pick(lines: list[Line], figure: str) -> dict[str, str]:
    """Return the fastest format at batch size 1, and the reason. `lines` are the
    measurements, PyTorch first. Formats are left out if the whole confidence interval
    of the change of their metric is on the worse side of zero."""
    sign, end = (-1, "change_low") if figure == LOSS else (1, "change_high")

    def is_good(line: Line) -> bool:
        change = line["change"] if line[end] is None else line[end]
        return bool(sign * change >= 0)

    worse = [line["format"] for line in lines[1:] if not is_good(line)]
    good = (line for line in lines if line["format"] not in worse)
    best = max(good, key=lambda line: line["rows_per_s_at_1"])
    ratio = best["rows_per_s_at_1"] / lines[0]["rows_per_s_at_1"]
    reason = f"{ratio:.1f} times PyTorch's rows/s at batch 1; {figure} changes by "
    reason += f"{best['change']:+.4f}"
    if best["change_low"] is not None:
        ends = "{change_low:+.4f} to {change_high:+.4f}".format(**best)
        reason += f" (95 % interval {ends})"
    logger.info("export: pick %s, %s", best["format"], reason)
    note = f" (worse: {', '.join(worse)})" if worse else ""
    return {"pick": best["format"], "reason": reason + note}
