"""Forms of rows other than one text column and one label column."""
