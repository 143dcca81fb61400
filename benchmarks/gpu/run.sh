#!/bin/sh
# On a machine with a GPU and without a network: install from .gpu what `make gpu-pack` has put
# there, and judge the GPU. From the project's root:  sh benchmarks/gpu/run.sh OUT [OPTIONS]
set -eu
python3 -m pip install -q --no-index --no-deps --no-cache-dir --disable-pip-version-check \
  --upgrade --target .gpu/site .gpu/wheels/*.whl
export PYTHONPATH="$PWD/src:$PWD/.gpu/site" PYTHONUNBUFFERED=1
if python3 -m trainckpt.process_dump.install .gpu/criu; then
  export TRAINCKPT_CRIU="$PWD/.gpu/criu/usr/sbin/criu"
fi
out=$1
shift
exec python3 -m benchmarks.gpu --json "$out" "$@"
