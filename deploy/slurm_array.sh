#!/usr/bin/env bash
# A Slurm job array with one GPU per job. Run it in the project, on a shared file system:
#   sbatch --array=1-8 deploy/slurm_array.sh predict    predicts an eighth in each job
#   sbatch --array=1-8 deploy/slurm_array.sh sweep      trains trials of one sweep
# A sweep needs a database server as `sweep.storage`. Its jobs can start at any time.
#SBATCH --job-name=flatout-array
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

case "${1:-}" in
  predict)
    exec kedro run --pipelines=predict \
      --params="predict.shard=$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
    ;;
  sweep)
    exec kedro run --pipelines=sweep
    ;;
  *)
    echo "usage: sbatch --array=1-N deploy/slurm_array.sh predict|sweep" >&2
    exit 2
    ;;
esac
