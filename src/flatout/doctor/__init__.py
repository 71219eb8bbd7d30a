"""`kedro doctor`: check the setup for a run with the same options and print a table."""

from flatout.doctor.examination import examination
from flatout.doctor.finding import as_json, as_table

__all__ = ["as_json", "as_table", "examination"]
