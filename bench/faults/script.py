"""The job of `python -m bench faults`: it sums over all ranks until a file `enough` exists. Its argument is a
fault of its own, or what it is to do when the fault comes."""

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as d

mode = sys.argv[1] if len(sys.argv) > 1 else ""
rank, node = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
if mode == "wrong-interface-on-one" and node == 1:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth99"
if mode == "ignores-sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
kept = []
d.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
for step in range(100000):
    stop = torch.tensor([float(Path("enough").exists())])
    d.all_reduce(stop)
    if step % 10 == 0:
        print("step", step, flush=True)
    if stop.item() or (step == 30 and mode in ("abort", "no-barrier")):
        break
    if mode == "early" and rank == 1 and step == 20:
        os._exit(0)
    if mode == "error" and rank == 2 and step == 20:
        raise RuntimeError("an error of the script")
    if mode == "disk" and step % 5 == 0:
        with Path(f"snapshot-{rank}").open("ab") as file:
            file.write(bytes(1 << 20))
    if mode == "memory" and "cloudddp-bench" in Path("/proc/self/cgroup").read_text():
        kept.append(b"x" * (32 << 20))
    time.sleep(0.1)
if mode != "no-barrier":
    d.barrier()
d.destroy_process_group()
if mode == "abort" and rank == 1:
    os.abort()
