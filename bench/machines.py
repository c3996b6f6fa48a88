"""Machine nodes of the simulator: how many of those that `up` launches become ready, how long that takes, and
how much memory a node needs. As root."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Options, script, simulator
from bench.tables import line, load
from cloudddp.simulator.hosts.machines import root_image

NODES, ROUNDS = 5, 4  # at once, because each systemd takes some of root's inotify instances (128 by default)


def bench_machines(_: Options) -> None:
    """Machine nodes: `up` under ssh.service and under ssh.socket."""
    if reason := root_image.unavailable_reason():
        print(f"machines: left out: {reason}")
        return
    print(f"machines: `up -n {NODES}`, {ROUNDS} times each; in brackets the load average before and after")
    before = load()
    os.environ.setdefault(root_image.VARIABLE, str(ROOT / ".venv-witness" / "roots"))  # made once: a minute
    with simulator("machine") as env, tempfile.TemporaryDirectory() as folder:

        def cloudddp(*words: str) -> subprocess.CompletedProcess[str]:
            command = [script("cloudddp"), "--sim", *words]
            return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)

        for name, value in (("ssh.service", 0), ("ssh.socket", 1)):
            cloudddp("sim", "conditions", json.dumps({"boot": {"ssh_socket": value}})).check_returncode()
            ready, up, down, memory, disk = 0, [], [], [], []
            for _round in range(ROUNDS):
                began = time.perf_counter()
                size = ("-n", str(NODES), "-t", "c5.xlarge", "--price", "0.2", "--allow-cpu")
                created = cloudddp("up", *size)
                up.append(time.perf_counter() - began)
                nodes = json.loads(cloudddp("sim", "status", "--json").stdout)["nodes"]
                if created.returncode == 0:
                    ready += len(nodes)
                else:
                    print(created.stderr[-500:])
                memory += [sum(map(_memory, node["processes"])) / 2**20 for node in nodes]
                disk += [_disk(env, node) / 2**20 for node in nodes]
                began = time.perf_counter()
                cloudddp("down", "-y").check_returncode()
                down.append(time.perf_counter() - began)
            line(f"{name}: ready, of {NODES * ROUNDS}", [ready], "")
            line(f"{name}: `up -n {NODES}`", up, "s")
            line(f"{name}: `down`", down, "s")
            line(f"{name}: memory of a node's processes", memory, "MB")
            line(f"{name}: its disk, in memory", disk, "MB")
    print(f"  [{before:.1f}, {load():.1f}]")


def _memory(pid: int) -> int:
    """Return the proportional set size of a process in bytes; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(one.split()[1]) << 10 for one in lines if one.startswith("Pss:")), 0)


def _disk(env: dict[str, str], node: dict[str, Any]) -> int:
    """Return the bytes in use on a node's disk, which is mounted in the simulator's namespace."""
    found = json.loads((Path(env["CLOUDDDP_HOME"]) / "sim" / "sim.json").read_text())
    nodes = Path(f"/proc/{found['pid']}/root{env['CLOUDDDP_HOME']}/sim/nodes")
    usage = os.statvfs(nodes / node["instance_id"] / "disk")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize
