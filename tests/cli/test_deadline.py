"""A job and the deadline of its cluster: the warning before it, and the report after it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from support.harness import finished, interrupt, lines_until

WAIT = "import time; print('began', flush=True); time.sleep(600)"


def set_deadline(ec2: Any, remains: Any, **left: float) -> None:
    """Give the nodes' tags that deadline, relative to now."""
    moment = f"{datetime.now(UTC) + timedelta(**left):%Y-%m-%dT%H:%M:%SZ}"
    ec2.create_tags(Resources=remains().instances, Tags=[{"Key": "cloudddp:expires", "Value": moment}])


def test_near_deadline_is_warned_of_and_unpulled_results_are_named(cli: Any, ec2: Any, remains: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_STOP_GRACE="1")
    cli.ok("up", "-n", "1")
    cli.write("ok.py", "")
    set_deadline(ec2, remains, minutes=20)
    near = cli("launch", "ok.py").stderr
    assert re.search(r"warning: the nodes terminate in 1\d min", near), near
    assert "results that are not pulled by then are lost" in near
    set_deadline(ec2, remains, seconds=80)
    cli.write("wait.py", f"open('model.pt', 'w').write('x')\n{WAIT}")
    process = cli.start("launch", "wait.py", CLOUDDDP_TIME_SCALE="0.3")  # 3 minutes are 54 s
    seen = lines_until(process.stderr, "to keep them, first: `cloudddp pull")
    assert re.search("warning: the nodes terminate in 5[1-4] s", seen), seen
    assert "not pulled from node 0: model.pt (1 byte) of job " in seen
    assert "is running" not in seen
    interrupt(process)


def test_job_ended_by_the_deadline_is_reported(cli: Any, ec2: Any, remains: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_STOP_GRACE="1")
    cli.ok("up", "-n", "1")
    set_deadline(ec2, remains, seconds=0)
    cli.write("wait.py", WAIT)
    process = cli.start("launch", "wait.py", CLOUDDDP_TIME_SCALE="0.2")
    assert "began" in process.stdout.readline()
    ec2.terminate_instances(InstanceIds=remains().instances)  # as the deadline's own shutdown does
    _, err = finished(process, 1)
    assert "none of its nodes is still running" in err
    assert "may still be running" not in err
    assert f"the deadline of cluster {cli.cluster}" in err
    assert "results that were not pulled are lost" in err
    assert "reached its deadline" in cli.fails(1, "pull")
