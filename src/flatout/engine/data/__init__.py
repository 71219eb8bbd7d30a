"""Reads raw texts, checks them, rejects rows with a reason, and splits the rest.

The modules in the order of use: `readers/` and `sessions/` read files, `raw_texts.py`
defines their common output. `columns.py` assigns the columns; `column_checks.py` and
`forms.py` read their values, `rows.py` checks rows. `row_facts.py`
keeps what `split.py` needs to assign splits, for texts (`split_recipes.py`), arrays and
images. `labels.py` and `split_report.py` write the reports.
"""
