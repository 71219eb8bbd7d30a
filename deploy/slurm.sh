#!/usr/bin/env bash
# Train on several machines under Slurm: sbatch deploy/slurm.sh, in the project.
# One task a machine; flatout starts a process a GPU on each. The project's folder (data/
# above all) lies on a file system that all machines share.
#SBATCH --job-name=flatout
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Three minutes before the end of the time, to this script alone (see `trap` below).
#SBATCH --signal=B:TERM@180
set -euo pipefail

first_machine=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export ENDPOINT="$first_machine:$((20000 + SLURM_JOB_ID % 20000))"

# Once, on one machine; skipped where the tokens are current. Texts may lie in a store
# (raw_texts with filepath: s3://...): they are fetched here and nowhere else.
srun --nodes=1 --ntasks=1 kedro run --pipelines=split,tokenize

# SLURM_NODEID is 0, 1, ... inside of the tasks. A machine that is done or has failed
# leaves the others five minutes to save and to end; they notice a failure by themselves.
srun --kill-on-bad-exit=0 --wait=300 bash -c 'exec kedro run --pipeline=train --params="\
train.distributed.num_machines=$SLURM_NNODES,\
train.distributed.machine_rank=$SLURM_NODEID,\
train.distributed.rendezvous_endpoint=$ENDPOINT"' &
training=$!
# To the job's steps, which finish their training step, save and leave. A TERM to srun
# itself would end them at once, by SIGKILL.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM

status=0
wait "$training" || status=$?
if [ "$status" -gt 128 ]; then # `wait` was cut short by the signal: wait for the save
  status=0
  wait "$training" || status=$?
fi
# 143: stopped and saved. The job goes on from there in its next turn.
if [ "$status" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
