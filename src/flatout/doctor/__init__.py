"""`kedro doctor`: checks the setup of a run with the same options, in one table."""

from flatout.doctor.examination import examination
from flatout.doctor.finding import as_json, as_table

__all__ = ["as_json", "as_table", "examination"]
