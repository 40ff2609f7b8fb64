#!/usr/bin/env bash
# One GPU, one call, under 8 minutes: the kernels of a GPU, then memory and time at real sizes. Needs torch, transformers, accelerate
# and peft, and no network: random weights, configs that ship with the package.
#
#   eval/gpu.sh OUTPUT_FOLDER            on a GPU
#   eval/gpu.sh OUTPUT_FOLDER toy        the same code at toy sizes on a CPU
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?output folder}
python=${PYTHON:-python}
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1
mkdir -p "$out"
if [ "${2:-}" = toy ]; then
    device=cpu sizes=(--toy --steps 1)
else
    device=cuda sizes=(--steps 5)
    "$python" -m pytest -m gpu -p no:cacheprovider 2>&1 | tee "$out/gpu_tests.txt" | tail -15
fi
timeout 400 "$python" eval/efficiency.py --device "$device" "${sizes[@]}" --output "$out/efficiency_gpu.json"
