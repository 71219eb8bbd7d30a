"""Read raw texts, reject invalid rows with a reason, and assign valid rows to splits.

`readers/` and `sessions/` read files, and `raw_texts.py` defines their common output.
`columns.py` maps columns to their roles, `column_checks.py` and `forms.py` read the
values of columns, and `rows.py` validates the rows. `row_facts.py` collects the data
from which `split.py` assigns rows to splits. `split_recipes.py` creates the splits of
texts, and `flatout.engine.arrays` creates the splits of arrays and images. `labels.py`
and `split_report.py` create the reports.
"""
