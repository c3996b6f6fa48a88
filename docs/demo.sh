#!/usr/bin/env bash
# The whole job on this computer, with the commands a user would type: two simulated nodes, a real training of a
# convolutional net on handwritten digits with two ranks on each, results brought back, everything taken down.
set -euo pipefail

here=$PWD/.demo
export CLOUDDDP_HOME=$here/state
[ -d "$CLOUDDDP_HOME" ] && cloudddp sim stop >/dev/null 2>&1 || true # of a demo that was killed
rm -rf "$here"
mkdir -p "$here"
cd "$here"
trap 'cloudddp sim stop >/dev/null 2>&1' EXIT

show() {
  printf '\n\033[1m$ %s\033[0m\n' "$*"
  "$@"
}

began=$SECONDS
show cloudddp init --example digits project
show cd project
show cloudddp --sim up --nodes 2 --instance-type g5.12xlarge
show cloudddp --sim launch --nproc-per-node 2 -m train.main --dataset digits
show cloudddp --sim pull
show cloudddp --sim down
show cloudddp --sim ls
show cloudddp sim stop

printf '\nbrought back:\n'
find results -type f | sort | sed 's/^/  /'
python3 - <<'PY'
import json, pathlib, sys

(status,) = pathlib.Path("results").rglob("status.json")
told = json.loads(status.read_text())
print(f"\ntraining {told['state']}: best test accuracy {told['best_accuracy']:.4f} after {told['epoch']} epochs")
sys.exit(0 if told["state"] == "finished" and told["best_accuracy"] >= 0.95 else "the demo did not reach 0.95")
PY
echo "done in $((SECONDS - began)) s; the files are in $here/project/results"
