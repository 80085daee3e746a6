#!/usr/bin/env bash
# One run of fedalloy on the nodes of a SLURM job:
#
#     sbatch --nodes=4 examples/cluster/slurm.sh RECIPE [OPTIONS of fedalloy run]
#
# Ray's head and the driver are on the job's first node, workers on all of them. The run folder (and engine.states, for
# algorithms whose clients keep states) must lie on a file system that all nodes have mounted. A job that SLURM ends is
# continued by submitting the same line with --resume.
#SBATCH --job-name=fedalloy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail

recipe=${1:?usage: sbatch slurm.sh RECIPE [OPTIONS of fedalloy run]}
shift
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
cpus=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=$cpus # since SLURM 22.05 srun gives its steps one core unless it is told
gpus=${SLURM_GPUS_ON_NODE:-0}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

on() { # on NODE COMMAND...: as a step of this job, beside others; replaces its subshell, so that a signal reaches it
    local node=$1
    shift
    exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$@"
}

ip=$(on "${nodes[0]}" hostname --ip-address | awk '{print $1}')
address=$ip:$((20000 + SLURM_JOB_ID % 20000))
steps=()
end() {
    for step in "${steps[@]}"; do kill "$step" 2>/dev/null || true; done
    wait
}
trap end EXIT

on "${nodes[0]}" ray start --head --block --disable-usage-stats --include-dashboard=false \
    --node-ip-address="$ip" --port="${address##*:}" --num-cpus="$cpus" --num-gpus="$gpus" &
steps+=($!)
until ray health-check --address "$address" 2>/dev/null; do
    kill -0 "${steps[0]}" || { echo "Ray's head did not start on ${nodes[0]}" >&2; exit 1; }
    sleep 1
done
for node in "${nodes[@]:1}"; do
    on "$node" ray start --block --disable-usage-stats --address="$address" --num-cpus="$cpus" --num-gpus="$gpus" &
    steps+=($!)
done

# SLURM sends SIGTERM to this script two minutes before the end: the driver ends after its round, with a checkpoint.
fedalloy run "$recipe" --engine ray --set engine.address="$address" --set engine.workers=$((${#nodes[@]} * cpus)) "$@" &
driver=$!
trap 'kill -TERM "$driver"' TERM INT
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do wait "$driver" || code=$?; done
for place in "${!steps[@]}"; do
    kill -0 "${steps[place]}" 2>/dev/null || echo "Ray on ${nodes[place]} ended before the run: see above why" >&2
done
exit "$code"
