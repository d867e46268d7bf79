# Starts Ray on all nodes of an allocation and waits until they are there; sourced by the batch scripts that use it. Leaves RAY_ADDRESS and the token in
# the environment, and Ray's steps as jobs of the shell, which end with it.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS=$address:6379

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT  # Ray's steps end before the job does
ray_step=(srun --overlap --output="$SLURM_JOB_NAME-$SLURM_JOB_ID.ray.log" --open-mode=append)
"${ray_step[@]}" --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port=6379 --num-cpus="$SLURM_CPUS_ON_NODE" --include-dashboard=false --temp-dir="/tmp/ray-$SLURM_JOB_ID" --block &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    "${ray_step[@]}" --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
        bash -c 'until ray start --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_ON_NODE" --block; do sleep 2; done' &
fi

timeout 180 python - "$SLURM_JOB_NUM_NODES" <<'PY'
import sys
import time

import ray

while not ray.is_initialized():
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError):
        time.sleep(1)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(1)
print(f"Ray runs on {sys.argv[1]} node(s)")
PY
