#!/usr/bin/env bash
# A complete run on this computer, with the commands that a user would type: two simulated nodes, training of a
# convolutional network on handwritten digits with two ranks on each, results pulled, everything removed.
set -euo pipefail

here=$PWD/.demo
export CLOUDDDP_HOME=$here/state
[ -d "$CLOUDDDP_HOME" ] && cloudddp sim stop >/dev/null 2>&1 || true # left by a demo that was killed
rm -rf "$here"
mkdir -p "$here"
cd "$here"
trap 'cloudddp sim stop >/dev/null 2>&1' EXIT

show() {
  printf '\n\033[1m$ %s\033[0m\n' "$*"
  "$@"
}

began=$SECONDS
show cloudddp init --example exact project
show cd project
show cloudddp --sim up --nodes 2 --instance-type g5.12xlarge
show cloudddp --sim launch --nproc-per-node 2 train.py
show cloudddp --sim pull --all-nodes
show cloudddp --sim down
show cloudddp --sim ls
show cloudddp sim stop

printf '\npulled:\n'
find results -type f | sort | sed 's/^/  /'
python3 - <<'PY'
import json, pathlib, sys

(path,) = pathlib.Path("results").rglob("runs/status.json")
status = json.loads(path.read_text())
print(f"\ntraining {status['state']}: best test accuracy {status['best_accuracy']:.4f} after {status['step']} steps")
sys.exit(0 if status["state"] == "finished" and status["best_accuracy"] >= 0.95 else "the demo did not reach 0.95")
PY
echo "done in $((SECONDS - began)) s; the files are in $here/project/results"
