#!/usr/bin/env bash
# Runs every measurement of docs/benchmarks.md that needs a GPU, on a machine without network. See --help.
#
# Each part is a process of its own with a time limit, so that one that fails or hangs does not cost the others. Without the
# sweep the limits add up to less than the total limit.
set -uo pipefail

usage() {
  cat <<'END'
usage: OUT=FOLDER bench/gpu.sh [--peers DIR] [--parts A,B] [--device cpu --short]

Measures in at most 575 seconds, on a machine with a GPU and without network:

  resnet50            ResNet-50, bf16, channels_last, compared with imagenet/main.py if --peers is given
  jpeg                ResNet-50 on JPEG files, with the share of time spent waiting for data; likewise
  resnet18            ResNet-18, bf16, channels_last; likewise
  small               the small network alone and under torchrun with one process: the price of the process group
  resnet50-compiled   ResNet-50 with torch.compile, ours alone
  resnet18-compiled   ResNet-18 with torch.compile, ours alone
  sweep               with two GPUs or more: the two-device pipeline over the size of its chunks, and a plot

Writes into OUT: log, machine.json, parts.jsonl (a line per part: ok, failed, timed out or not started), and a PART.json
of each part, sweep.svg too.

  --peers DIR         a checkout of github.com/pytorch/examples
  --parts A,B         only these parts
  --device cpu --short   every part in miniature on the CPU, to test this script; the figures mean nothing
  --limit SECONDS     the limit of every part, instead of its own
  --total SECONDS     at most this long in total (default: 575)

The variable PYTHON names the interpreter (default: python3); it needs torch and torchvision.
Exit status: 0; 1 some part failed; 2 bad usage, or no GPU.
END
}

refuse() {
  echo "gpu.sh: $*" >&2
  exit 2
}

readonly known="resnet50 jpeg resnet18 small resnet50-compiled resnet18-compiled sweep"
python=${PYTHON:-python3} peers='' device=cuda short='' total=575 given='' chosen=$known
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --short) short=yes; shift; continue ;;
    --peers | --parts | --device | --limit | --total) (($# > 1)) || refuse "$1 needs a value; see --help" ;;
    *) refuse "unknown argument $1; see --help" ;;
  esac
  case $1 in
    --peers) peers=$(realpath -- "$2") ;;
    --parts) chosen=${2//,/ } ;;
    --device) device=$2 ;;
    --limit) given=$2 ;;
    --total) total=$2 ;;
  esac
  shift 2
done
for name in $chosen; do
  [[ " $known " == *" $name "* ]] || refuse "no part is named $name; choose from ${known// /, }"
done
[[ $device == cuda || $device == cpu ]] || refuse "--device $device: must be cuda or cpu"
[[ ${given:-1} =~ ^[1-9][0-9]*$ && $total =~ ^[1-9][0-9]*$ ]] || refuse "--limit and --total must be positive integers"
[[ $device == cuda || -n $short ]] || refuse "--device cpu measures nothing of use: add --short to test this script"
[[ -z $peers || -f $peers/imagenet/main.py ]] || refuse "--peers $peers: must be a checkout of github.com/pytorch/examples"
[[ -n ${OUT:-} ]] || refuse "set OUT to the folder for the results"

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
gpus=0
if [[ $device == cuda ]]; then
  gpus=$(timeout 120 "$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null) || gpus=0
  ((gpus)) || refuse "torch finds no GPU here ($python); --device cpu --short tests this script without one"
fi

mkdir -p "$OUT" || exit 1
OUT=$(realpath -- "$OUT")
log=$OUT/log
: >"$log"
: >"$OUT/parts.jsonl"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work # what a part leaves when it is killed goes, too; and nothing is compiled beforehand
# One machine, perhaps without any other interface.
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo

# train.config needs annotations of tyro, and train.cli its name; only a command line of the trainer needs the rest, and
# none is parsed here: process_group makes its flags, and the sweep gets a Sweep. So where tyro is not installed, this takes
# its place. (A copy of tyro would have to bring its own dependencies, and to be updated.)
if ! "$python" -c 'import tyro' 2>/dev/null; then
  mkdir -p "$work/stand-in/tyro"
  cat >"$work/stand-in/tyro/__init__.py" <<'END'
"""Stands in for tyro, which is not installed: annotations work, command lines do not."""

from typing import Annotated, TypeVar

T = TypeVar("T")


class conf:
    Positional = Annotated[T, "positional"]

    @staticmethod
    def arg(**_options):
        return None
END
  export PYTHONPATH=$work/stand-in${PYTHONPATH:+:$PYTHONPATH}
  echo "tyro is not installed: using a stand-in" | tee -a "$log"
fi

failed=()
timeout 120 "$python" - "$OUT/machine.json" <<'END' 2>&1 | tee -a "$log" || failed+=("machine.json")
import json, os, platform, subprocess, sys, time
import torch, torchvision

def output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return ""

gpu = "name,driver_version,memory.total,power.limit,clocks.max.sm"
record = {
    "date": time.strftime("%Y-%m-%d", time.gmtime()),
    "gpus": output("nvidia-smi", f"--query-gpu={gpu}", "--format=csv,noheader").splitlines(),
    "torch": torch.__version__,
    "torchvision": torchvision.__version__,
    "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
    "Python": platform.python_version(),
    "processors": len(os.sched_getaffinity(0)),
    "commit": output("git", "rev-parse", "HEAD"),
}
with open(sys.argv[1], "w") as file:
    json.dump(record, file, indent=2)
print(json.dumps(record))
END

# part NAME SECONDS COMMAND...: run the command, which writes OUT/NAME.json, and record how it ended.
part() {
  local name=$1 limit=$2 status=0 began=$SECONDS logged
  shift 2
  [[ " $chosen " == *" $name "* ]] || return 0
  limit=${given:-$limit}
  limit=$((limit < total - SECONDS ? limit : total - SECONDS))
  rm -f "$OUT/$name.json"
  echo "== $name, at most $((limit > 0 ? limit : 0)) s" | tee -a "$log"
  logged=$(wc -c <"$log")
  local result=ok
  if ((limit < 1)); then
    result="not started"
  else
    # Into a file and not a pipe: a process that outlives its part would keep a pipe open.
    timeout -k 5 "$limit" "$@" >>"$log" 2>&1 </dev/null
    status=$?
    tail -c "+$((logged + 1))" "$log"
    case $status in
      0) [[ -s $OUT/$name.json ]] || result="failed" ;;
      124 | 137) result="timed out" ;;
      *) result="failed" ;;
    esac
  fi
  [[ $result == ok ]] || failed+=("$name ($result)")
  printf '{"part": "%s", "result": "%s", "exit": %d, "seconds": %d, "limit": %d}\n' \
    "$name" "$result" "$status" "$((SECONDS - began))" "$limit" >>"$OUT/parts.jsonl"
}

# bench NAME SECONDS ARGUMENTS...: a part that is a case of bench.train.bench.
bench() {
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" "$python" -m bench.train.bench "$@" "${size[@]}" --device "$device" --json "$OUT/$name.json"
}

beside=() size=(--turns 3) sweep='{"model": "resnet50", "batch_size": 120, "image_size": 128}' plot=''
if [[ -n $peers ]]; then
  beside=(--peers "$peers")
fi
if [[ -n $short ]]; then
  size=(--turns 1 --steps 1 --batch-size 2 --image-size 32)
  sweep='{"model": "mnist", "batch_size": 4, "image_size": 12, "splits": "1,2", "steps": 1, "repeats": 2}'
  export TORCHDYNAMO_DISABLE=1 # compiling takes longer than everything else
fi
# The plot needs matplotlib, which a GPU image may lack; the figures are in sweep.json all the same.
if "$python" -c 'import matplotlib' 2>/dev/null; then
  plot=$OUT/sweep.svg
fi

bench resnet50 65 resnet50 "${beside[@]}"
bench jpeg 160 jpeg "${beside[@]}" # every turn of a side starts 12 workers
bench resnet18 60 resnet18 "${beside[@]}"
part small 110 "$python" -m bench.train.process_group --device "$device" ${short:+--short --turns 1} --json "$OUT/small.json"
# Ours alone: compiling the peer's network, too, would take another minute each.
bench resnet50-compiled 95 resnet50 --variants compile
bench resnet18-compiled 75 resnet18 --variants compile
if ((gpus > 1)) || [[ $device == cpu ]]; then
  part sweep 100 "$python" -c '
import json, sys
from bench.train import sweep
from bench.train.sweep_config import Sweep
flags, device, results, plot = sys.argv[1:]
sweep.run(Sweep(**json.loads(flags), device=device, json=results, plot=plot))' \
    "$sweep" "$device" "$OUT/sweep.json" "$plot"
fi

if ((${#failed[@]})); then
  printf -v list ', %s' "${failed[@]}"
  echo "not complete after $SECONDS s: ${list:2}" | tee -a "$log"
  exit 1
fi
echo "complete after $SECONDS s: results are in $OUT" | tee -a "$log"
