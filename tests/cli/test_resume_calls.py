"""`resume` and the calls to AWS: lost answers, refusals, kill -9 in the middle; and what is recorded of a
job."""

from __future__ import annotations

import fcntl
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, finished, lines_until, listed_nodes, remaining, wait_for
from support.interrupts import interrupted_at, interrupted_at_call, start_interrupted
from support.jobs import direct, homes

SCRIPT = """
import os, sys
print('value', os.environ.get('A'), os.environ.get('B'), sys.argv[1:], flush=True)
raise SystemExit(5)
"""


SAVE = """
import os, time
os.makedirs('out', exist_ok=True)
for name in ('both.pt', *(['1.pt'] if os.environ['RANK'] == '1' else [])):
    open(f'out/{name}', 'w').write('saved')
time.sleep(600)
"""


@pytest.fixture
def failed(cli: Any, ec2: Any) -> list[str]:
    """A cluster with a job that has failed, and without node 1. Return the instances: that of node 0, and the
    lost one."""
    cli.write("script.py", SCRIPT)
    direct(cli, nodes=2)
    assert cli("launch", "script.py").returncode == 5
    ids = [node["instance_id"] for node in listed_nodes(cli)]
    ec2.terminate_instances(InstanceIds=ids[1:])
    wait_for(lambda: live(ec2, cli.cluster) == ids[:1], "the node has terminated")
    return ids


def launched(ec2: Any, cluster: str) -> dict[str, str]:
    """Return the states of all instances of a cluster, also those that have ended."""
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cluster]}]
    found = ec2.describe_instances(Filters=where)["Reservations"]
    return {i["InstanceId"]: i["State"]["Name"] for r in found for i in r["Instances"]}


def live(ec2: Any, cluster: str) -> list[str]:
    return [one for one, state in launched(ec2, cluster).items() if state in ("pending", "running")]


def test_failed_launches_leave_the_other_nodes(cli: Any, ec2: Any, faults: Any, failed: list[str]) -> None:
    """Refused, interrupted, completed by AWS after the client has given up, and with a lost answer: then the
    node is launched, and not twice."""
    faults.fail("RunInstances", "UnauthorizedOperation", status=403)
    assert "UnauthorizedOperation" in cli.fails(1, "resume")
    assert live(ec2, cli.cluster) == failed[:1]

    err = interrupted_at_call(cli, faults, "RunInstances", "resume")
    assert "then removing the new node" in err
    assert live(ec2, cli.cluster) == failed[:1]

    before = len(launched(ec2, cli.cluster))
    faults.complete_late("RunInstances", 1.0)
    cli.fails(1, "resume", CLOUDDDP_TIME_SCALE="0.2")
    assert live(ec2, cli.cluster) == failed[:1]
    assert len(launched(ec2, cli.cluster)) == before + 1, "AWS has not completed the call"

    faults.lose_answer("RunInstances")
    cli.ok("resume", "-d")
    assert len(live(ec2, cli.cluster)) == 2
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing


def test_killed_before_the_answer_of_the_launch(cli: Any, ec2: Any, faults: Any, failed: list[str]) -> None:
    """The instance exists, and this computer does not know its id."""
    interrupted_at_call(cli, faults, "RunInstances", "resume", number=signal.SIGKILL)
    wait_for(lambda: len(live(ec2, cli.cluster)) == 2, "the node was launched")
    before = set(live(ec2, cli.cluster))
    assert "was launched by a command that was killed" in cli.messages("resume", "-d")
    assert set(live(ec2, cli.cluster)) == before
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing


def test_variables_are_read_again_and_never_recorded(cli: Any, tmp_path: Path) -> None:
    direct(cli)
    cli.write("script.py", SCRIPT)
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
    assert "['--resume', 'a.pt', '-x']" in cli("resume", "-e", "A=another", "--", "-x").stdout
    env.unlink()
    assert "job.env" in cli.fails(2, "resume", "-e", "A=another")


def test_node_that_is_lost_while_another_is_replaced_is_replaced_too(
    cli: Any, ec2: Any, faults: Any, failed: list[str]
) -> None:
    came, go = faults.hold("RunInstances")
    process = cli.start("resume", "-d")
    assert came.wait(60)
    ec2.terminate_instances(InstanceIds=failed[:1])
    wait_for(lambda: failed[0] not in live(ec2, cli.cluster), "the other node has terminated")
    go.set()
    _, err = finished(process, 0)
    assert "no node that job" in err
    assert "2 ranks on 2 nodes" in err
    assert len(live(ec2, cli.cluster)) == 2


@pytest.mark.parametrize(
    ("moment", "caller", "words"),
    [
        ("connect", "_resume_job", ("resume",)),
        ("connect_reachable", "connected", ("exec", "--node", "0", "--", "true")),
    ],
)
@pytest.mark.usefixtures("failed")
def test_command_says_that_another_one_has_removed_the_cluster(
    cli: Any, ec2: Any, moment: str, caller: str, words: tuple[str, ...]
) -> None:
    number = int(signal.SIGSTOP)
    process = start_interrupted(
        cli, f"cluster.connect:{moment}", *words, caller=caller, on_call=True, number=number
    )
    status = Path(f"/proc/{process.pid}/stat")
    wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "the command is stopped")
    ec2.terminate_instances(InstanceIds=live(ec2, cli.cluster))
    wait_for(lambda: not live(ec2, cli.cluster), "the nodes have terminated")
    process.send_signal(signal.SIGCONT)
    _, err = finished(process, 1)
    assert "somebody terminated it, with a `down` or another call" in err


def test_ctrl_c_while_watch_starts_the_job_again(cli: Any, ec2: Any, failed: list[str]) -> None:
    _, err = interrupted_at(cli, "job.launch:launch", "watch", on_call=True)
    assert "has lost a node; resuming it" in err
    assert "was being started; it was ended; the cluster is still up" in err
    assert len(live(ec2, cli.cluster)) == len(failed)


def test_launch_that_was_refused_or_killed_before_its_start_is_not_resumed(cli: Any) -> None:
    direct(cli)
    cli.write("script.py", SCRIPT)
    cli.write("wait.py", "import time\ntime.sleep(600)\n")
    job = cli.ok("launch", "-d", "wait.py").strip()
    assert cli("launch", "script.py").returncode == 1
    assert cli("launch", "script.py", "--nproc-per-node", "9").returncode in (1, 2)
    cli.ok("cancel", job)
    assert f"resuming job {job} as" in cli.messages("resume", "-d")
    unknown = cli("resume", "nothing")
    assert "jobs: " in unknown.stderr
    assert f"{job}, " in unknown.stderr
    cli.ok("cancel")
    at_call: Any = {"on_call": True, "number": signal.SIGKILL, "code": -signal.SIGKILL}
    interrupted_at(cli, "job.launch:launch", "launch", "script.py", **at_call)
    assert "was not started on any node" in cli.fails(1, "resume", "-d")


def test_nothing_to_resume(cli: Any, tmp_path: Path) -> None:
    cli.env["CLOUDDDP_HOME"] = str(tmp_path / "state")  # without the jobs of other tests
    cli.ok("up", "-n", "1")
    assert "no job of this cluster was launched from this computer" in cli.fails(1, "resume")
    assert cli("resume", "--nodes-min", "0").returncode == 2
    assert cli("watch", "--times", "0").returncode == 2


def test_replacement_gets_what_the_lost_node_had_written(cli: Any, ec2: Any) -> None:
    """Another node had got a copy before: the only one that is left."""
    cli.write("save.py", "import os\nif os.environ['RANK'] == '0': open('snapshot', 'w').write('saved')\n")
    cli.write("fail.py", "import os\nprint('found', os.path.exists('snapshot'))\nraise SystemExit(5)\n")
    direct(cli, nodes=2)
    cli.ok("launch", "save.py")
    assert cli("launch", "fail.py").stdout.count("found True") == 2
    ids = [node["instance_id"] for node in listed_nodes(cli)]
    ec2.terminate_instances(InstanceIds=ids[:1])
    wait_for(lambda: live(ec2, cli.cluster) == ids[1:], "the node has terminated")
    assert cli("resume").stdout.count("found True") == 2
    reported = cli("jobs")
    assert "node 1: snapshot (5 bytes)" in reported.stderr, reported.stderr


def test_what_only_the_lost_node_has_is_named_before_another_is_bought(cli: Any, ec2: Any) -> None:
    """The newest file is of the end of the job: the ranks save at a notice."""
    cli.write("save.py", SAVE)
    direct(cli, nodes=2)
    process = cli.start("launch", "save.py", CLOUDDDP_HEARTBEAT="2")
    report = ".cloudddp/jobs/*/wrote-1.json"
    wait_for(lambda: any(list(home.glob(report)) for home in homes(cli)), "node 1 has reported its files")
    ids = [node["instance_id"] for node in listed_nodes(cli)]
    ec2.terminate_instances(InstanceIds=ids[1:])
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode, err
    assert "only node 1 has out/1.pt:" in err, err
    resumed = cli("resume", "-d")
    before, _, after = resumed.stderr.partition("only node 1 has out/1.pt:")
    assert after, resumed.stderr
    assert live(ec2, cli.cluster) != ids[:1]
    assert "launching" in after, resumed.stderr
    assert "launching" not in before


def test_watch_waits_while_another_command_resumes_the_job(cli: Any) -> None:
    """Until all nodes have started their part, the job is that of the first ones only, and the ranks of the
    others would be missing in what `watch` shows."""
    direct(cli, nodes=2)
    cli.write("wait.py", "import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    cli.ok("launch", "-d", "wait.py")
    (folder,) = (
        path.parent
        for path in Path(cli.env["CLOUDDDP_HOME"]).glob("clusters/*/cluster.json")
        if json.loads(path.read_text())["name"] == cli.cluster
    )
    with (folder / "resume-lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = cli.start("watch")
        lines_until(
            process.stderr, "waiting for another cloudddp command, which resumes a job of this cluster"
        )
        assert "another cloudddp command is resuming a job of cluster" in cli.fails(1, "resume")
    lines = {process.stdout.readline() for _ in range(2)}
    assert lines == {"[rank 0 | node 0] began\n", "[rank 1 | node 1] began\n"}
    cli.ok("cancel")
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, "next:" in err) == (130, False), err
