#!/bin/bash
# A training on one node. Submit it with: sbatch one-node.sh. See docs/preemption.md.
#SBATCH --job-name=training
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# SIGTERM to this script 180 s before the time limit; B: means only to this script.
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

# Bash runs a trap only between two commands, so the training is in the background. A second
# signal must not interrupt the second wait. $! is the training.
stopped=
trap 'trap "" TERM; stopped=1; kill -TERM "$!"' TERM

limpet run --grace 150s -- \
    torchrun --standalone --nproc-per-node=8 train.py --run "$HOME/runs/a" &
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
