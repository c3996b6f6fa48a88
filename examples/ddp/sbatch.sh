#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
#
# Written by `cloudddp export slurm`. Submit it with sbatch in the project's folder, on a file system that all nodes share.
# One task per node starts torchrun, which starts the ranks. It needs Slurm 20.11, bash 4.2 and iproute2, or newer.
#
# Exit code: that of the rank that failed first. Before the time limit each rank gets SIGTERM once, to save a snapshot. If it
# then exits with 143 (128 + SIGTERM), or if a node is lost, the job is requeued, and the script resumes from its snapshot.
# A script that never saves would be requeued indefinitely: max_requeues limits that.

# shellcheck disable=SC1003,SC2016,SC2034,SC2153,SC2317,SC2329  # user text; functions that run on the nodes
python=python3
ranks=1 # per node
max_requeues=10
nodes=$SLURM_JOB_NUM_NODES
port=$((20000 + SLURM_JOB_ID % 10000))
attempt=${SLURM_RESTART_COUNT:-0}
rendezvous=$SLURM_JOB_ID-$attempt
state=$PWD/slurm-$SLURM_JOB_ID.$attempt.state # process ids and exit codes of the ranks of this attempt

job_environment() {
  :
}

# -- on each node ------------------------------------------------------------------------------------------

# Find this node's address and interface: those of its route to node 0; on node 0, of its route to node 1. Each resolves the
# other's name, since a node's own name may mean 127.0.1.1.
find_interface() {
  local peer=$first route
  if ((nodes == 1)); then
    address=127.0.0.1 interface=lo head=127.0.0.1
    return
  fi
  if ((node_rank == 0)); then peer=$second; fi
  peer=$(getent ahostsv4 "$peer" | awk '$1 !~ /^127\./ { print $1; exit }')
  route=$(ip -4 -o route get "$peer") && [[ $route == *" dev "*" src "* ]] || return
  interface=${route#* dev } address=${route#* src }
  interface=${interface%% *} address=${address%% *} head=$peer
  if ((node_rank == 0)); then head=$address; fi
}

node() {
  local node_rank=$SLURM_NODEID is_head=false address interface head threads program
  if ((node_rank == 0)); then is_head=true; fi
  if ! find_interface; then
    echo "$SLURMD_NODENAME: no IPv4 route to $first and $second, the first nodes of the job" >&2
    exit 1
  fi
  if ! cat /proc/sys/kernel/random/boot_id >"$state/$SLURMD_NODENAME.boot"; then
    echo "$SLURMD_NODENAME: submit the job in a folder that all nodes share" >&2
    exit 1
  fi
  threads=$(($(env -u OMP_NUM_THREADS nproc) / ranks)) # nproc would print OMP_NUM_THREADS
  if ((threads < 1)); then threads=1; fi
  echo "$SLURMD_NODENAME: node $node_rank, $address on $interface, ranks: $ranks"
  export PYTHONUNBUFFERED=1
  export NCCL_SOCKET_IFNAME="=$interface"
  export GLOO_SOCKET_IFNAME="$interface"
  export TP_SOCKET_IFNAME="$interface"
  export NCCL_DEBUG=WARN
  export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
  export OMP_NUM_THREADS="$threads"
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=180
  job_environment
  program="$(declare -f rank; declare -p state); rank \"\$@\""
  # torchrun replaces $$ by $ in arguments, and $local_rank.
  exec "$python" \
    -c \
    'import sys; sys.path[:] = filter(None, sys.path); from torch.distributed.run import main; main()' \
    "--nnodes=$nodes" \
    --nproc-per-node=1 \
    --max-restarts=0 \
    "--local-addr=$address" \
    --rdzv-backend=c10d \
    "--rdzv-id=$rendezvous" \
    "--rdzv-endpoint=$head:$port" \
    "--rdzv-conf=is_host=$is_head,read_timeout=600" \
    --no-python \
    bash -c "${program//\$/\$\$}" rank \
    "$python" train.py
}

# Run one rank, as torchrun's child, and record how it ended. SIGUSR1: the job has to stop, so the rank gets SIGTERM, and
# torchrun sees success once it has saved. Otherwise torchrun and srun would kill ranks that are still saving.
rank() {
  local mark=$state/$SLURMD_NODENAME.$LOCAL_RANK child='' asked='' stopping='' code
  forward() {
    asked=yes
    if [[ $child ]]; then kill -TERM "$child" 2>/dev/null; fi
  }
  trap forward TERM
  trap 'stopping=yes; forward' USR1
  "$@" &
  child=$!
  echo "$BASHPID" >"$mark.pid"
  if [[ -e $state/stop ]]; then stopping=yes asked=yes; fi
  if [[ $asked ]]; then forward; fi
  code=0 asked=yes
  while [[ $asked ]]; do # a signal interrupts wait
    asked=''
    wait "$child"
    code=$?
  done
  trap '' TERM USR1 # Slurm signals every process of the task: `date`, too
  echo "$(date +%s%N) $code $RANK" >"$mark.exit"
  # This rank may have stopped with the others, before its own signal came.
  if [[ $stopping || -e $state/stop ]] && ((code == 143)); then code=0; fi
  exit "$code"
}

# -- on the first node -------------------------------------------------------------------------------------

log() { printf 'sbatch script: %s\n' "$*" >&2; }

fail() {
  log "$1"
  exit "${2:-1}"
}

# Print how slurmd on a node is reached, by name or address.
address_of() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }

# Slurm sends SIGUSR1 before the time limit.
stop_ranks() {
  log "the time limit is near: asking the ranks to save and to stop"
  touch "$state/stop"
  timeout -k 5 60 srun --overlap --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none bash -c \
    'for one in "$0/$SLURMD_NODENAME".*.pid; do [[ ! -e $one ]] || kill -USR1 "$(cat "$one")"; done' "$state"
}

# Print the nodes that did not record the end of every rank, and have rebooted or start no program. Slurm requeues the job of a
# node that it finds down, but if the node is back before, only the step ends.
lost_nodes() {
  local host ended
  for host in "${hosts[@]}"; do
    ended=("$state/$host".*.exit)
    if [[ ! -e $state/$host.boot ]] || { [[ -e ${ended[0]} ]] && ((${#ended[@]} >= ranks)); }; then continue; fi
    timeout -k 5 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" cat /proc/sys/kernel/random/boot_id 2>/dev/null |
      cmp --quiet - "$state/$host.boot" || echo "$host"
  done
}

# Requeue the job if that is possible. Exit with this code in any case.
requeue() {
  # After scancel, and where Slurm requeues the job by itself, it is not RUNNING any more.
  if [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) != RUNNING ]]; then exit "$1"; fi
  if ((attempt >= max_requeues)); then fail "not requeued again: max_requeues is $max_requeues" "$1"; fi
  log "requeue $((attempt + 1)) of at most $max_requeues"
  scontrol requeue "$SLURM_JOB_ID"
  exit "$1"
}

[[ -f train.py ]] || fail 'no train.py here: submit the job in the project'"'"'s folder' 2
# Slurm itself requeues a job that has lost a node, without this limit.
if ((attempt > max_requeues)); then fail "requeued $attempt times: max_requeues is $max_requeues"; fi
rm -rf -- "$PWD/slurm-$SLURM_JOB_ID".*.state # of an attempt whose first node was lost
mkdir -- "$state" || fail "cannot write to $PWD: submit the job in a folder that all nodes share"
trap 'rm -rf -- "$state"' EXIT
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=$(address_of "${hosts[0]}") second=$(address_of "${hosts[1]:-${hosts[0]}}")

cancelled=''
trap 'cancelled=yes' TERM # scancel, a preemption, the time limit itself, or a lost node
trap stop_ranks USR1
on_nodes=$(
  declare -f job_environment find_interface node rank
  declare -p python ranks nodes port rendezvous state first second
)
srun --export=ALL --kill-on-bad-exit=1 --label --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none \
  bash -c "$on_nodes; node" &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal interrupts wait
wait "$step"
code=$?

read -r _ failed rank < <(cat "$state"/*.exit 2>/dev/null | LC_ALL=C sort -n | awk 'NF == 3 && $2 != 0' | head -n 1)
if ((code == 0)) && ((${failed:-0} != 143)); then exit 0; fi
if [[ ${failed-} ]]; then
  if ((failed == 143)); then
    log "rank $rank stopped after SIGTERM (exit code 143)"
  else
    log "rank $rank failed first, with exit code $failed"
  fi
  code=$failed
fi
if [[ $cancelled ]]; then exit "$code"; fi
if ((code == 143)); then requeue "$code"; fi
lost=$(lost_nodes)
if [[ $lost ]]; then
  log "lost node: ${lost//$'\n'/, }"
  requeue "$code"
fi
exit "$code"
