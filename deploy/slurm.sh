#!/usr/bin/env bash
# Train on several machines under Slurm: sbatch deploy/slurm.sh, in the project.
# Slurm starts one task per machine; flatout starts one process per GPU. The project
# folder, including data/, must be on a file system that all machines share.
#SBATCH --job-name=flatout
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Sent three minutes before the time limit, only to this script (see `trap` below).
#SBATCH --signal=B:TERM@180
set -euo pipefail

first_machine=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export ENDPOINT="$first_machine:$((20000 + SLURM_JOB_ID % 20000))"

# Runs once, on one machine, and is skipped if the tokens are up to date. Texts in a store
# (raw_texts with filepath: s3://...) are fetched only here.
srun --nodes=1 --ntasks=1 kedro run --pipelines=split,tokenize

# SLURM_NODEID is 0, 1, ... inside the tasks. If a machine finishes or fails, the others have
# five minutes to save and end. They detect a failure automatically.
srun --kill-on-bad-exit=0 --wait=300 bash -c 'exec kedro run --pipeline=train --params="\
train.distributed.num_machines=$SLURM_NNODES,\
train.distributed.machine_rank=$SLURM_NODEID,\
train.distributed.rendezvous_endpoint=$ENDPOINT"' &
training=$!
# Signals the job's steps, which complete their training step, save and end. A TERM to
# srun itself would end them immediately with SIGKILL.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM

status=0
wait "$training" || status=$?
if [ "$status" -gt 128 ]; then # the signal interrupted `wait`: wait for the save
  status=0
  wait "$training" || status=$?
fi
# Exit code 143: stopped and saved. When the job is requeued, it resumes from there.
if [ "$status" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
