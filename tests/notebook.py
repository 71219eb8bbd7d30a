"""Run the cells of a notebook in IPython: `python -m tests.notebook FILE GIVEN ASKED`.

GIVEN is code that runs after the cell tagged `parameters`. ASKED runs after the last
cell. If a cell fails, the process prints the traceback and exits with status 1.
"""

import json
import os
import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell


def cells_of(file: Path) -> list[dict]:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def main(file: Path, given: str, asked: str) -> int:
    cells = cells_of(file)
    os.chdir(file.parent)  # where Jupyter starts the kernel
    shell = InteractiveShell.instance(colors="NoColor")
    for cell in cells:
        code = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", ()):
            code = f"{code}\n{given}"
        if not shell.run_cell(code).success:
            return 1
    return 0 if shell.run_cell(asked).success else 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3]))
