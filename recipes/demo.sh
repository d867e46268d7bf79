#!/usr/bin/env bash
# The whole way on a small target, on CPU: conversations, features, four drafters (one a control), acceptance, decoding, report.
# Run:   recipes/demo.sh [smollm2|tiny] [DRAFTER ...]     with kvshot on the PATH; `make demo` sets that up first
#        DRAFTER: a recipe of the target's folder; `make families` names one of every kind
# Cost:  smollm2 at most 25 minutes on 2 cores, tiny about 2 minutes. A second run reuses what is there.
# Output: work/TARGET (or $KVSHOT_WORK); the path of the report is printed last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${1:-smollm2}
case $target in
    smollm2) recipes=recipes/smollm2_135m ;;
    tiny) recipes=recipes/tiny ;;
    *)
        echo "usage: recipes/demo.sh [smollm2|tiny] [DRAFTER ...]" >&2
        exit 2
        ;;
esac
drafters=("${@:2}")
[ ${#drafters[@]} -gt 0 ] || drafters=(hidden_only kv_only kv_none hybrid)
model=${XDG_CACHE_HOME:-$HOME/.cache}/kvshot-ds/$target
work=${KVSHOT_WORK:-work/$target}
here=("target.path=$model" "work=$work")

# CPU only, even where there is an accelerator; nothing is looked up on a hub; libraries keep quiet.
export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1
export TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 RAY_USAGE_STATS_ENABLED=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 PYTHONUNBUFFERED=1 RAY_AUTH_MODE=token
export PYTHONWARNINGS=ignore::FutureWarning,ignore::UserWarning:huggingface_hub.utils.tqdm

names=() notes=()
current=start
trap 'status=$?; [ $status -eq 0 ] || echo "demo: stage $current failed with status $status; the same command continues from there" >&2' EXIT

stamp() { stat -c %y "$1" 2>/dev/null || true; }

# stage NAME OUTPUT COMMAND...: prints the command, runs it, and keeps its seconds, unless OUTPUT was there before and is unchanged.
stage() {
    current=$1
    local output=$2 before begin seconds
    shift 2
    if [ -t 1 ]; then printf '\n\033[1m[%s]\033[0m $' "$current"; else printf '\n[%s] $' "$current"; fi
    printf ' %q' "$@"
    printf '\n'
    before=$(stamp "$output")
    begin=$(date +%s%N)
    "$@"
    seconds=$(awk "BEGIN { printf \"%.1f\", ($(date +%s%N) - $begin) / 1e9 }")
    names+=("$current")
    if [ -n "$before" ] && [ "$before" = "$(stamp "$output")" ]; then
        notes+=("reused ($seconds s)")
    else
        notes+=("$seconds s")
        python - "$work/timings.json" "$current" "$seconds" <<'PY'
import sys
from pathlib import Path

from kvshot_ds.files import read_json, write_json

path = Path(sys.argv[1])
write_json(path, {**(read_json(path) if path.exists() else {}), sys.argv[2]: float(sys.argv[3])})
PY
    fi
}

# Two ranks share the cores: one thread each.
train() { stage "train $1" "$work/runs/$1/train.json" env OMP_NUM_THREADS=1 deepspeed -q --num_accelerators 2 --module kvshot_ds.cli train "$recipes/$1.yaml" "${here[@]}"; }

stage target "$model/config.json" kvshot target "$target" "$model"
stage prep "$work/prepared/summary.json" kvshot prep "$recipes/base.yaml" "${here[@]}"
stage capture "$work/features/manifest.json" kvshot capture "$recipes/base.yaml" "${here[@]}"
for drafter in "${drafters[@]}"; do train "$drafter"; done
last=$work/runs/${drafters[-1]}
all=$(printf ",$work/runs/%s" "${drafters[@]}")
stage eval "$last/eval.json" kvshot eval "$recipes/base.yaml" "${here[@]}" "eval.drafters=[${all:1}]"
stage decode "$last/decode.json" kvshot decode "$recipes/base.yaml" "${here[@]}" "decode.drafters=[${all:1}]"
stage report "$work/report/index.html" kvshot report "$recipes/base.yaml" "${here[@]}"

printf '\n%-20s %s\n' stage "time of this run"
for i in "${!names[@]}"; do printf '%-20s %s\n' "${names[$i]}" "${notes[$i]}"; done
printf '%-20s %s s\n\n' total "$SECONDS"
printf 'To go on by hand: kvshot target %s targets/%s, where the recipes of %s look for it.\n' "$target" "$target" "$recipes"
realpath "$work/report/index.html"
