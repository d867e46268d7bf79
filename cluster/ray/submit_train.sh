#!/usr/bin/env bash
# Submits one training to a running Ray cluster as a job and follows its log: `kvshot train --ray`, whose ranks Ray places. A worker that
# dies is replaced and all ranks continue from the newest checkpoint, ray.restarts times.
#   cluster/ray/submit_train.sh recipes/qwen3_8b/hybrid.yaml ray.ranks=64 ray.gpus_per_rank=1 ray.cpus_per_rank=8
# `ray job stop ID` lets the ranks finish their step and write a checkpoint; the same command again continues from there.
# RAY_API_SERVER_ADDRESS, KVSHOT_ROOT, token: as in submit_capture.sh. `work` and `target.path` have to be on storage that every node sees.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: cluster/ray/submit_train.sh RECIPE [section.field=value ...]" >&2; exit 2; }
export RAY_AUTH_MODE=token
# Ray kills what has not ended so many seconds after `ray job stop`, by default three
exec ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" \
    --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}}' -- \
    bash -c "cd ${KVSHOT_ROOT:-~/kvshot-ds} && exec env PATH=\$PWD/.venv/bin:\$PATH kvshot train --ray$(printf ' %q' "$@")"
