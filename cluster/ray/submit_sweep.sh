#!/usr/bin/env bash
# Submits one sweep to a running Ray cluster as a job and follows its log: `kvshot sweep run`, whose trials Ray places, as many at once as fit.
#   cluster/ray/submit_sweep.sh recipes/qwen3_8b/sweep_table5.yaml ray.ranks=8 ray.gpus_per_rank=1 ray.cpus_per_rank=8
# `ray job stop ID` lets the running trials finish their step and write a checkpoint; the same command again trains what is left, and continues
# those. `kvshot sweep status WORK/sweeps/NAME` tells from anywhere that sees `work` how far it is.
# RAY_API_SERVER_ADDRESS, KVSHOT_ROOT, token: as in submit_capture.sh. `work` and `target.path` have to be on storage that every node sees.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: cluster/ray/submit_sweep.sh RECIPE [section.field=value ...]" >&2; exit 2; }
export RAY_AUTH_MODE=token
# Ray kills what has not ended so many seconds after `ray job stop`, by default three
exec ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" \
    --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}}' -- \
    bash -c "cd ${KVSHOT_ROOT:-~/kvshot-ds} && exec env PATH=\$PWD/.venv/bin:\$PATH kvshot sweep run$(printf ' %q' "$@")"
