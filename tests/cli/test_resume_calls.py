"""`resume` and the calls to AWS: lost answers, Ctrl-C, kill -9 in the middle; and what is recorded of a
job."""

from __future__ import annotations

import fcntl
import json
import signal
from pathlib import Path
from typing import Any

from support.harness import TIMEOUT, finished, lines_until, listed_nodes, remaining, wait_for
from support.interrupts import interrupted_at, interrupted_at_call, start_interrupted
from support.jobs import direct

SCRIPT = """
import os, sys
print('value', os.environ.get('A'), os.environ.get('B'), sys.argv[1:], flush=True)
raise SystemExit(5)
"""


def launched(ec2: Any, cluster: str) -> dict[str, str]:
    """Return the states of all instances of a cluster, also those that have ended."""
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cluster]}]
    found = ec2.describe_instances(Filters=where)["Reservations"]
    return {i["InstanceId"]: i["State"]["Name"] for r in found for i in r["Instances"]}


def live(ec2: Any, cluster: str) -> list[str]:
    return [one for one, state in launched(ec2, cluster).items() if state in ("pending", "running")]


def lose(ec2: Any, cluster: str, nodes: list[str]) -> None:
    ec2.terminate_instances(InstanceIds=nodes)
    wait_for(lambda: not {*nodes} & {*live(ec2, cluster)}, "the nodes have terminated")


def test_lost_node_is_replaced_once_whatever_happens_to_the_launch(cli: Any, ec2: Any, faults: Any) -> None:
    cli.write("script.py", SCRIPT)
    direct(cli, nodes=2)
    assert cli("launch", "script.py").returncode == 5
    first, second = (node["instance_id"] for node in listed_nodes(cli))
    lose(ec2, cli.cluster, [second])

    err = interrupted_at_call(cli, faults, "RunInstances", "resume")
    assert "then removing the new node" in err
    assert live(ec2, cli.cluster) == [first]

    # AWS completes the call after the client has given up.
    before = len(launched(ec2, cli.cluster))
    faults.complete_late("RunInstances", 1.0)
    cli.fails(1, "resume", CLOUDDDP_TIME_SCALE="0.2")
    assert live(ec2, cli.cluster) == [first]
    assert len(launched(ec2, cli.cluster)) == before + 1, "AWS has not completed the call"

    # Killed: the instance exists, and this computer does not know its id.
    interrupted_at_call(cli, faults, "RunInstances", "resume", number=signal.SIGKILL)
    wait_for(lambda: len(live(ec2, cli.cluster)) == 2, "the node was launched")
    nodes = set(live(ec2, cli.cluster))
    _, err = interrupted_at(cli, "job.launch:launch", "resume", on_call=True)
    assert "was launched by a command that was killed" in err
    assert "was being started; it was ended; the cluster is still up" in err
    assert set(live(ec2, cli.cluster)) == nodes

    # Another command removes the cluster meanwhile.
    number = int(signal.SIGSTOP)
    process = start_interrupted(
        cli, "cluster.connect:connect", "resume", caller="_resume_job", on_call=True, number=number
    )
    status = Path(f"/proc/{process.pid}/stat")
    wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "the command is stopped")
    lose(ec2, cli.cluster, [*nodes])
    process.send_signal(signal.SIGCONT)
    _, err = finished(process, 1)
    assert "somebody terminated it, with a `down` or another call" in err
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing


def test_what_is_recorded_of_a_job_and_resumed(cli: Any, tmp_path: Path) -> None:
    """Variables are read again; a launch that was refused, or killed before its start, is no job."""
    direct(cli)
    cli.write("script.py", SCRIPT)
    cli.write("wait.py", "import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    env = tmp_path / "job.env"
    env.write_text("B=from-file\n")
    first = cli("launch", "-e", "A=typed-secret", "--env-file", str(env), "script.py")
    assert "value typed-secret from-file" in first.stdout
    recorded = "".join(path.read_text() for path in Path(cli.env["CLOUDDDP_HOME"]).rglob("job-*.json"))
    assert "typed-secret" not in recorded
    assert "from-file" not in recorded
    refused = cli.fails(2, "resume")
    assert "the value of A for job " in refused
    assert "-e A=VALUE" in refused
    env.write_text("B=changed\n")
    again = cli.exits(5, "resume", "-e", "A=another", "--", "--resume", "a.pt")
    assert "value another changed ['--resume', 'a.pt']" in again.stdout
    env.unlink()
    assert "job.env" in cli.fails(2, "resume", "-e", "A=another")

    job = cli.ok("launch", "-d", "wait.py").strip()
    assert cli("launch", "script.py").returncode == 1
    unknown = cli.fails(1, "resume", "nothing")
    assert "jobs: " in unknown
    assert job in unknown
    waits(cli)
    assert f"resuming job {job} as" in cli.messages("resume", "-d")
    cli.ok("cancel")
    at_call: Any = {"on_call": True, "number": signal.SIGKILL, "code": -signal.SIGKILL}
    interrupted_at(cli, "job.launch:launch", "launch", "script.py", **at_call)
    assert "was not started on any node" in cli.fails(1, "resume", "-d")


def waits(cli: Any) -> None:
    """`watch` waits while another command resumes the job, and follows it until it is cancelled."""
    (cluster,) = json.loads(cli.ok("status", "--json"))
    lock = Path(cli.env["CLOUDDDP_HOME"]) / "clusters" / cluster["cluster_id"] / "resume-lock"
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = cli.start("watch")
        lines_until(
            process.stderr, "waiting for another cloudddp command, which resumes a job of this cluster"
        )
        assert "another cloudddp command is resuming a job of cluster" in cli.fails(1, "resume")
    assert process.stdout.readline() == "[rank 0 | node 0] began\n"
    cli.ok("cancel")
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, "next:" in err) == (130, False), err
