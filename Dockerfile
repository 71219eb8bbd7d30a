# The project in a container, with the locked versions, as an unprivileged user.
#
#   docker build -t flatout .
#   docker run --rm --init -v flatout-data:/app/data flatout
#   docker run --rm --init --gpus all --shm-size=8g -v flatout-data:/app/data flatout \
#     kedro run --pipelines=benchmark
#
# For your files add -v "$PWD/conf/local:/app/conf/local:ro". Loader workers pass batches
# through shared memory; without --shm-size a container has 64 MiB. With
# --init, `docker stop` need not kill pipelines that do not handle signals.
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 \
    ORT_DISABLE_TELEMETRY=1

# Triton and torch.compile compile C code at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 flatout
WORKDIR /app

# Installed packages depend only on these files, so this layer is cached; code follows.
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY src/flatout/__init__.py src/flatout/__init__.py
RUN pip install -c requirements.lock -e '.[arrays,export,images,lora,s3]'

# The benchmark writes conf/tuned, the sweep conf/best, and every run data. A new volume
# takes over the owner of its folder.
RUN install -d -o flatout -g flatout conf conf/tuned conf/best data
COPY --chown=flatout:flatout conf conf
COPY src src

USER flatout
CMD ["kedro", "run"]
