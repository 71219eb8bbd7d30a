"""Convert files of numbers to samples of one shape, in three splits."""

from functools import partial

from flatout.pipelines.samples import create

create_pipeline = partial(create, "arrays")
