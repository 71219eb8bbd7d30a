# The project in a container, with the locked versions, as a user without rights.
#
#   docker build -t flatout .
#   docker run --rm -v flatout-data:/app/data flatout
#   docker run --rm --gpus all --shm-size=8g -v flatout-data:/app/data flatout \
#     kedro run --pipelines=benchmark
#
# Files of your own: add -v "$PWD/conf/local:/app/conf/local:ro". Loader workers hand
# batches over in shared memory, of which a container has 64 MiB without --shm-size.
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1

# Triton and torch.compile build a little C at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 flatout
WORKDIR /app

# What is installed changes with these files alone; code comes after it.
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY src/flatout/__init__.py src/flatout/__init__.py
RUN pip install -c requirements.lock -e '.[arrays,images]'

# The benchmark writes conf/tuned, every run writes data.
RUN install -d -o flatout -g flatout conf data
COPY --chown=flatout:flatout conf conf
COPY src src

USER flatout
CMD ["kedro", "run"]
