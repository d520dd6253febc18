#!/usr/bin/env bash
# Everything that needs a GPU, in one visit of ten minutes: token equality with the torch back
# end, time per step, and the step-time profile. Expects blitzd[cuda,dev] to be installed, nvcc
# for FlashInfer's first compilation (or its modules compiled ahead), and, for the embedded
# model, `blitzd model pull smollm2-135m` to have been run. Results are left in OUT.
#
#     PYTHON=.venv/bin/python OUT=gpu-check scripts/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-gpu-check}
mkdir -p "$OUT"
export PYTHONPATH=$PWD

"$PYTHON" - <<'PY' | tee "$OUT/machine.txt" || exit 1
import sys
import torch
import flashinfer
if not torch.cuda.is_available():
    sys.exit("no CUDA device: nothing of this can be checked here")
print(torch.cuda.get_device_name(), torch.version.cuda, torch.__version__, flashinfer.__version__)
PY

# All modules at once: FlashInfer would compile them one after the other, on first use.
began=$SECONDS
for module in "decode bfloat16 64" "prefill bfloat16 64" "prefill bfloat16 128" \
    "decode bfloat16 64 --window" "prefill bfloat16 64 --window"; do
    # shellcheck disable=SC2086 # three or four words
    timeout 300 "$PYTHON" scripts/compile_flashinfer.py $module >>"$OUT/compile.txt" 2>&1 &
done
wait
echo "compiled in $((SECONDS - began)) s"

timeout 200 "$PYTHON" -m pytest -m gpu tests/gpu -s -q 2>&1 | tee "$OUT/tests.txt"
tests=$?
timeout 90 "$PYTHON" -m blitzd bench engine --device cuda --dtype bfloat16 --batch 1 8 32 \
    --context 128 1024 4096 --prompt 128 512 2048 --out "$OUT/step-times.json" \
    2>&1 | tee "$OUT/bench.txt"
bench=$?
echo "tests: $tests, bench: $bench (0 is good); see $OUT/"
exit $((tests != 0 || bench != 0))
