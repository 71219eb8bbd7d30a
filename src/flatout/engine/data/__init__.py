"""Raw texts in: read, check, reject with a reason, split.

In the order of the rows' way: `readers/` and `sessions/` read files, and `raw_texts.py`
says what any source gives. `columns.py` knows which column is what; `column_checks.py`
and `forms/` read its values, `rows.py` judges them. `row_facts.py` and `row_hashes.py`
keep what `split.py` needs of every row to decide its split, which it does for texts
(`text_split.py`), arrays and images alike; `labels.py` and `split_report.py` say what
was found, `split_recipes.py` how the catalog gets it.
"""
