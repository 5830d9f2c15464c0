#!/usr/bin/env bash
# Builds Horovod for the torch of a Python environment, once, and prints the wheel's path.
#
#   requirements/build_horovod.sh [python]        default: .venv/bin/python
#
# PyTorch on CPUs over Gloo, from the unmodified source on the package index; 3 to 7 minutes on two cores.
# The wheel only works with the torch it was built for, so torch's version is part of the cache's key.
set -euo pipefail

version=0.28.1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${1:-$here/../.venv/bin/python}
say() { printf 'horovod: %s\n' "$*" >&2; }

key=$("$python" -c 'import sys, torch; print("torch-%s-cp%d%d" % (torch.__version__, *sys.version_info[:2]))')
cache=${XDG_CACHE_HOME:-~/.cache}/crossover/wheels/$key
wheel=$(find "$cache" -name "horovod-$version-*.whl" -print -quit 2>/dev/null || true)
if [ -n "$wheel" ]; then
    say "using the wheel built before for $key"
    printf '%s\n' "$wheel"
    exit 0
fi

missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
[ -e "$header" ] || missing+=(python3-dev)
if [ ${#missing[@]} -gt 0 ]; then
    say "cannot build, missing: ${missing[*]}"
    say "remedy (Debian, Ubuntu): apt-get install ${missing[*]}"
    exit 1
fi

"$python" -m pip install --quiet --constraint "$here/constraints.txt" \
    cffi cloudpickle cmake packaging psutil pyyaml setuptools wheel
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/wheels"

# One build, whatever this shell's settings: options of other builds would not show in the cache's key.
for name in ${!HOROVOD_@}; do unset "$name"; done
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
export CMAKE_TOOLCHAIN_FILE=$here/horovod.cmake
# Started by make, this build would otherwise try to share that make's job slots.
unset MAKELEVEL MFLAGS
export MAKEFLAGS=-j${BUILD_JOBS:-$(nproc)}
bin=$(cd "$(dirname "$python")" && pwd)
export PATH=$bin:$PATH

say "building $version for $key with $MAKEFLAGS (minutes) ..."
# pip's own cache would hand out a wheel built for another torch.
if ! "$python" -m pip wheel --no-cache-dir --no-build-isolation --no-deps --no-binary horovod \
    --wheel-dir "$work/wheels" "horovod==$version" >"$work/log" 2>&1; then
    tail -n 40 "$work/log" >&2
    say "the build failed; above is the end of its output"
    exit 1
fi
mkdir -p "$cache"
wheel=$cache/$(basename "$work"/wheels/horovod-*.whl)
# Copied, then renamed: another build never finds half a wheel.
cp "$work"/wheels/horovod-*.whl "$wheel.$$"
mv "$wheel.$$" "$wheel"
say "built in $SECONDS s"
printf '%s\n' "$wheel"
