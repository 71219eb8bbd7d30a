"""Convert numeric files to samples of the same shape, in three splits."""

from functools import partial

from flatout.pipelines.samples import create

create_pipeline = partial(create, "arrays")
