"""`kedro flatout init`: conf/local derived from the data."""
