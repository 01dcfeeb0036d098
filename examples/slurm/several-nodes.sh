#!/bin/bash
# A training on several nodes. Submit it with: sbatch several-nodes.sh. See docs/preemption.md.
#SBATCH --job-name=training
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# SIGTERM to this script 180 s before the time limit; B: means only to this script.
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Bash runs a trap only between two commands, so the training is in the background. A second
# signal must not interrupt the second wait. $! is the training.
stopped=
trap 'trap "" TERM; stopped=1; kill -TERM "$!"' TERM

# One "limpet run" per node, which reports the workers of this node. srun passes SIGTERM on to
# all of them, and returns the highest of their exit codes.
srun --kill-on-bad-exit=0 limpet run --grace 150s -- \
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=8 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$host:29400" \
    train.py --run "$HOME/runs/a" &
training=$!
wait "$training"
code=$?
if [ -n "$stopped" ] && [ "$code" -gt 128 ]; then # the trap interrupted the wait
    wait "$training"
    code=$?
fi

case "$code" in
75) scontrol requeue "$SLURM_JOB_ID" ;; # saved: run it again
76)                                     # stopped without a save: run it again, but not forever
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit "$code"
