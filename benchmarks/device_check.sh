#!/usr/bin/env bash
# Checks and measures the CUDA path on a machine with one NVIDIA GPU: the tests marked `cuda`, the
# kernel under compute-sanitizer where that is there, then `tiering-bench device`. Needs Python with
# numpy, PyTorch's CUDA build, Triton, cuda-bindings and pytest. Uses no network, installs nothing,
# and ends within 8 minutes.
#
#   benchmarks/device_check.sh [FOLDER]          results go there; default: device-check
#   RUNTIME=fake benchmarks/device_check.sh      on the emulated device: does the script itself work?
#   PYTHON=python3.12 benchmarks/device_check.sh
#
# Exit code: 0 all tests pass and all aims are met, 1 not, 2 it could not be run.
set -u

here=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-device-check}
python=${PYTHON:-python3}
runtime=${RUNTIME:-cuda}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$here" || exit 2
export PYTHONPATH="$here:$here/connectors:$here/kernels:$here/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
failed=0

step() { printf '\n== %s\n' "$*"; }

step "what is here"
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi
"$python" - <<'PROGRAM' || exit 2
import importlib, platform, sys
print("Python", platform.python_version())
for name in ("numpy", "torch", "triton", "cuda.bindings", "pytest"):
    try:
        print(name, getattr(importlib.import_module(name), "__version__", "?"))
    except ImportError as error:
        print(name, "is not here:", error)
PROGRAM

# Beside the sources, as `make` does it; what there is of it is kept, if it can be used here.
step "native code"
loads='from tiering_kernels.devicecalls import device_calls; raise SystemExit(not device_calls())'
if "$python" -c "$loads"; then
    echo "is there"
elif timeout 30 "$python" hatch_build.py; then
    echo "was compiled"
else
    echo "cannot be compiled here: the device is asked for the end of a copy, and rings no bell"
fi

step "tests on the device"
KV_TIERING_DEVICE=$runtime timeout 110 "$python" -m pytest -c /dev/null --rootdir "$here/tests/cuda" \
    --noconftest -p no:cacheprovider -q -rs -W ignore::pytest.PytestUnknownMarkWarning \
    "$here/tests/cuda" 2>&1 | tee "$out/tests.log"
code=${PIPESTATUS[0]}
[ "$code" -eq 0 ] || failed=1

if [ "$runtime" = cuda ] && command -v compute-sanitizer >/dev/null; then
    step "the kernel under compute-sanitizer"
    timeout 90 compute-sanitizer --error-exitcode 9 "$python" -m pytest -c /dev/null \
        --rootdir "$here/tests/cuda" --noconftest -p no:cacheprovider -q \
        -W ignore::pytest.PytestUnknownMarkWarning "$here/tests/cuda" -k kernel 2>&1 |
        tee "$out/sanitizer.log" | tail -n 15
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
else
    step "compute-sanitizer is not used here"
fi

step "tiering-bench device"
timeout 200 "$python" -m tiering_benchmarks.device --runtime "$runtime" --seconds 110 \
    --json "$out/device.json" 2>&1 | tee "$out/device.log"
code=${PIPESTATUS[0]}
[ "$code" -eq 0 ] || failed=1
[ "$code" -ne 2 ] || failed=2

step "results: $out"
exit "$failed"
