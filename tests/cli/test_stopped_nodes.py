"""A node that EC2 says does not run: every verb names it, and those that can use the other nodes do."""

from __future__ import annotations

from typing import Any

from support.harness import finished, listed_nodes, wait_for
from support.jobs import direct, written

WRITE = (
    "import os\nos.makedirs('runs', exist_ok=True)\nopen('runs/' + os.environ['RANK'], "
    "'w').close()\nprint('hello')\n"
)


def test_verbs_use_the_nodes_that_run_and_name_the_stopped_one(cli: Any, ec2: Any) -> None:
    """Until it is started again."""
    direct(cli, nodes=2)
    cli.write("write.py", WRITE)
    cli.ok("launch", "write.py")
    cli.shared = None
    node = listed_nodes(cli)[1]["instance_id"]
    ec2.stop_instances(InstanceIds=[node])
    wait_for(lambda: listed_nodes(cli)[1]["state"] == "stopped", "it has stopped")
    sentence = f"node 1 ({node}) is stopped (Client.UserInitiatedShutdown"
    pulled = cli.exits(0, "pull", "--node", "0")
    assert "node 0: 1 file" in pulled.stdout
    assert sentence in pulled.stderr
    for words, code, out in (
        (("exec", "--node", "0", "--", "echo hello"), 0, "hello"),
        (("jobs",), 1, "succeeded"),
    ):
        done = cli.exits(code, *words)
        assert out in done.stdout
        assert sentence in done.stderr
    for words in (("exec", "--", "true"), ("launch", "write.py"), ("resume",)):
        err = cli.fails(1, *words)
        assert sentence in err
        assert "resume --replace 1" in err, err
    for words, code in (
        (("watch", "--times", "1"), 0),  # of the node that runs
        (("cancel",), 1),
    ):
        done = cli.exits(code, *words, CLOUDDDP_TIME_SCALE="0.1")
        assert sentence in done.stderr, (words, done.stderr)
        assert "Traceback" not in done.stderr
    ec2.start_instances(InstanceIds=[node])
    wait_for(lambda: listed_nodes(cli)[1]["state"] == "running", "it runs again")
    assert cli.ok("exec", "--", "echo hello").count("hello") == 2


def test_run_keeps_a_node_that_was_stopped(cli: Any, ec2: Any) -> None:
    """What the job has written there cannot be copied."""
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1")
    cli.write("wait.py", WRITE + "import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    process = cli.start("run", "-n", "2", "-t", "g5.12xlarge", "wait.py", CLOUDDDP_STOP_GRACE="1")
    written(cli, "began")
    node = listed_nodes(cli)[1]["instance_id"]
    ec2.stop_instances(InstanceIds=[node])
    _, err = finished(process, 3)
    line = next(one for one in err.splitlines() if f"node 1: AWS reports that {node} is stop" in one)
    assert "; `aws ec2 start-instances --region us-east-1 --instance-ids " in line
    assert line.endswith(" launches another")
    assert "node 0: 1 file, " in err
    assert "node 1 did not answer, so its files are unknown" in err
