"""Measures SSH to a node directly, through a jump host, and by proxy commands, in the simulator's network.

`python -m bench routes` starts a simulator and runs this file in it with `cloudddp sim exec`. A second node of the default VPC
is the jump host.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from bench import lab
from cloudddp.ssh import keys
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.routes.command import ProxyCommand
from cloudddp.ssh.routes.jump import Jump
from cloudddp.ssh.running import CommandSpec
from cloudddp.ssh.target import DIRECT, Route, Target

BYTES = 200 << 20
_PIECE = 1 << 17
_COMMANDS = 20
_RUNS = 3


def targets(home: Path) -> Iterator[tuple[str, Target]]:
    """Launch a node and a jump host; yield each route to the node by name. The user's SSH files are written to `home`."""
    account, login, host = lab.Account(), keys.generate(), keys.generate()
    account.ec2.import_key_pair(KeyName="bench", PublicKeyMaterial=login.public.encode())
    config = {"ssh_keys": {"ed25519_private": host.private, "ed25519_public": host.public}}
    reply = account.ec2.run_instances(
        ImageId=account.image, InstanceType="t3.medium", MinCount=2, MaxCount=2, SecurityGroupIds=[account.group],
        KeyName="bench", UserData="#cloud-config\n" + json.dumps(config),
    )  # fmt: skip
    ids = [one["InstanceId"] for one in reply["Instances"]]
    lab.until(lambda: lab.all_in_state(account, ids, "running"))
    node, jump = account.instances(ids)
    for one in (node, jump):
        lab.wait_for_ssh(one["PublicIpAddress"])
    folder = home / ".ssh"
    folder.mkdir()
    key = folder / "id_ed25519"
    key.touch(mode=0o600)
    key.write_text(login.private)
    (folder / "known_hosts").write_text(f"{jump['PublicIpAddress']} {host.public}\n")
    through = f"ubuntu@{jump['PublicIpAddress']}"
    files = f"-F none -i {key} -o UserKnownHostsFile={folder}/known_hosts"
    routes: dict[str, tuple[str, Route]] = {
        "direct": (node["PublicIpAddress"], DIRECT),
        "proxy_jump": (node["PrivateIpAddress"], Jump(through)),
        "ssh -W": (
            node["PrivateIpAddress"],
            ProxyCommand(f"ssh {files} -W {node['PrivateIpAddress']}:22 {through}", {}),
        ),
        "sim session": (
            node["PrivateIpAddress"],
            ProxyCommand(f"{sys.executable} -m cloudddp sim session --target {node['InstanceId']}", {}),
        ),
    }
    for name, (address, route) in routes.items():
        yield name, Target(name, address, 22, "ubuntu", key, (host.public,), route)
    account.terminate(ids)


def measure(target: Target) -> dict[str, float]:
    """Return the seconds to connect and for a command, and the bytes per second to the node and from it."""
    started = time.perf_counter()
    connection = Connection.open(target)
    opened = time.perf_counter() - started
    commands = []
    for _ in range(_COMMANDS):
        started = time.perf_counter()
        connection.run(CommandSpec("true"))
        commands.append(time.perf_counter() - started)
    started = time.perf_counter()
    connection.run(CommandSpec("cat > /dev/null", stdin=(bytes(_PIECE) for _ in range(BYTES // _PIECE))))
    sent = BYTES / (time.perf_counter() - started)
    started = time.perf_counter()
    connection.run(CommandSpec(f"head -c {BYTES} /dev/zero", on_stdout=lambda _: None))
    received = BYTES / (time.perf_counter() - started)
    connection.close()
    return {"open": opened, "command": statistics.median(commands), "sent": sent, "received": received}


def main() -> None:
    """Print one line of JSON per route: medians of `measure`."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = folder
        for name, target in targets(Path(folder)):
            rows = [measure(target) for _ in range(_RUNS)]
            print(
                json.dumps(
                    {"route": name, **{key: statistics.median(r[key] for r in rows) for key in rows[0]}}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
