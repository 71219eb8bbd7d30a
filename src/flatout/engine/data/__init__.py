"""Read raw texts, reject invalid rows with a reason, and assign the others to splits.

`readers/` and `sessions/` read files, and `raw_texts.py` defines their common output.
`columns.py` maps columns to their roles, `column_checks.py` and `forms.py` read their
values, and `rows.py` validates the rows. `row_facts.py` keeps the data that `split.py`
needs to assign splits. Texts are split in `split_recipes.py`, arrays and images in
`flatout.engine.arrays`. `labels.py` and `split_report.py` write the reports.
"""
