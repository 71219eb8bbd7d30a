"""The tests. What must be set before torch is imported is set here."""

import os

os.environ.update(
    DO_NOT_TRACK="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    # There is a test process for each core.
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    TORCHINDUCTOR_COMPILE_THREADS="1",
)
