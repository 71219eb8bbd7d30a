# The project in a container, with the locked versions, as an unprivileged user.
#
#   docker build -t flatout .
#   docker run --rm -v flatout-data:/app/data flatout
#   docker run --rm --gpus all --shm-size=8g -v flatout-data:/app/data flatout \
#     kedro run --pipelines=benchmark
#
# For your files add -v "$PWD/conf/local:/app/conf/local:ro". Loader workers pass batches
# through shared memory; without --shm-size a container has 64 MiB.
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1

# Triton and torch.compile compile C code at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 flatout
WORKDIR /app

# Installed packages depend only on these files, so this layer is cached; code follows.
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY src/flatout/__init__.py src/flatout/__init__.py
RUN pip install -c requirements.lock -e '.[arrays,images,lora]'

# The benchmark writes conf/tuned, and every run writes data.
RUN install -d -o flatout -g flatout conf data
COPY --chown=flatout:flatout conf conf
COPY src src

USER flatout
CMD ["kedro", "run"]
