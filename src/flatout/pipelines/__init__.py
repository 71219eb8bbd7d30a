"""One folder a pipeline; `kedro run --pipelines=<folder>`."""
