"""Convert image files to images of the same size, in three splits."""

from functools import partial

from flatout.pipelines.samples import create

create_pipeline = partial(create, "images")
