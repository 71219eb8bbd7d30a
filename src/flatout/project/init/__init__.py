"""`kedro flatout init`: conf/local from a look at the data."""
