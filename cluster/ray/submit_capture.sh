#!/usr/bin/env bash
# Submits `kvshot capture` to a running Ray cluster as a job and follows its log; the cluster's machines come from cluster.yaml,
# Kubernetes or by hand.
#   cluster/ray/submit_capture.sh recipes/qwen3_8b/base.yaml capture.workers=16
# RAY_API_SERVER_ADDRESS  dashboard of the head, default http://127.0.0.1:8265 (`ray dashboard cluster/ray/cluster.yaml` forwards it)
# KVSHOT_ROOT             the repository on the cluster's nodes, with its .venv, default ~/kvshot-ds as cluster.yaml lays it; relative
#                         paths of the recipe start there. `work` and `target.path` have to be on storage that every node sees.
# Token authentication: Ray's ports would otherwise run anyone's code. `ray get-auth-token --generate` once, the file
# ~/.ray/auth_token copied to every node, and RAY_AUTH_MODE=token wherever Ray is started.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: cluster/ray/submit_capture.sh RECIPE [section.field=value ...]" >&2; exit 2; }
export RAY_AUTH_MODE=token
exec ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" -- \
    bash -c "cd ${KVSHOT_ROOT:-~/kvshot-ds} && PATH=\$PWD/.venv/bin:\$PATH kvshot ${STAGE:-capture}$(printf ' %q' "$@")"
