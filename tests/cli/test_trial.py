"""`doctor --trial`: one node from `up` to `down`, and a report that can be shown to anybody."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from support.harness import finished, instances_of, lines_until

CHECKED = ("--trial", "--price", "1")  # a list of prices gets old
ID = re.compile(
    r"\b(?:i|sg|key|ami|vpc|subnet|pg|eni|vol|c|trial)-[0-9a-f]{6,}|\d+\.\d+\.\d+\.\d+|\b\d{12}\b|moto"
)


def report_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("cloudddp-trial-*.json")
    text = path.read_text()
    assert not ID.findall(text)
    assert str(Path.home()) not in text
    found: dict[str, Any] = json.loads(text)
    return found


def trial_nodes(ec2: Any, err: str) -> list[str]:
    """Return the nodes that are left of the trial."""
    (name,) = set(re.findall(r"cluster (trial-[0-9a-f]{6})", err))
    return instances_of(ec2, name)


def test_trial_creates_uses_and_removes_a_node_and_reports_each_phase(cli: Any, ec2: Any) -> None:
    err = cli.messages("doctor", *CHECKED)
    assert trial_nodes(ec2, err) == []
    assert "nothing is left" in err
    report = report_in(cli.cwd)
    assert (report["result"], report["left"], report["aws_calls"]) == ("passed", False, [])
    assert [phase["name"] for phase in report["phases"]] == ["doctor", "up", "exec", "down"]
    assert report["checks"]["quota"] == "pass"
    assert report["node"]["python"].startswith("Python 3.")
    assert {"programs", "modules of python3", "/opt/pytorch", "group docker", "nofile"} <= report[
        "node"
    ].keys()
    assert report["cluster"]["type"] == "g4dn.xlarge"
    names = {step["name"] for step in report["steps"]}
    assert {"AWS ec2 run_instances", "SSH connect", "wait: nodes are terminated"} <= names
    assert not [line for line in err.splitlines() if "(seconds)" in line]  # no waterfall


def test_failed_launch_is_in_the_report_by_its_code(cli: Any, ec2: Any, conditions: Any) -> None:
    refused = {"code": "VcpuLimitExceeded", "message": "no i-0123456789 for 10.0.0.1"}
    conditions(reject={"RunInstances": {**refused, "status": 400, "calls": 100}})
    err = cli.fails(1, "doctor", *CHECKED)
    assert trial_nodes(ec2, err) == []
    report = report_in(cli.cwd)
    assert (report["result"], report["failed_in"], report["left"]) == ("failed", "up", False)
    assert refused["code"] in [
        one["code"] for one in report["aws_calls"] if one["call"] == "ec2 run_instances"
    ]


def test_interrupted_trial_removes_its_node(cli: Any, ec2: Any, conditions: Any) -> None:
    """As its terminal is closed."""
    conditions(boot={"ssh_seconds": 600})
    process = cli.start("doctor", *CHECKED)
    shown = lines_until(process.stderr, "waiting for SSH")
    process.send_signal(signal.SIGHUP)
    _, rest = finished(process, 130)
    assert trial_nodes(ec2, shown + rest) == []
    report = report_in(cli.cwd)
    assert (report["result"], report["failed_in"]) == ("interrupted", "up")


def test_node_that_fails_the_checks_is_removed_and_the_next_step_is_a_trial(
    cli: Any, ec2: Any, conditions: Any
) -> None:
    """Not `up`, whose settings may cost more. Calls that boto3 has repeated are in the report, too."""
    conditions(boot={"failed_gpus": 1}, throttle={"RunInstances": 2})
    # Instead of 60 s for the GPUs.
    err = cli.fails(1, "doctor", *CHECKED, CLOUDDDP_TIME_SCALE="0.1")
    assert trial_nodes(ec2, err) == []
    assert err.splitlines()[-1].endswith("to try another one: `cloudddp doctor --trial`"), err
    report = report_in(cli.cwd)
    assert {"call": "ec2 run_instances", "code": "", "retries": 2} in report["aws_calls"]
    assert report["failed_in"] == "up"


def test_failed_check_creates_nothing_and_is_in_the_report(cli: Any, conditions: Any, faults: Any) -> None:
    conditions(quota={"on-demand-g": 0})
    err = cli.fails(1, "doctor", *CHECKED)
    assert "1 check failed: quota" in err
    assert "doctor --trial -t t3.large" in err
    assert "RunInstances" not in faults.calls
    report = report_in(cli.cwd)
    assert (report["failed_in"], report["checks"]["quota"]) == ("doctor", "fail")


def test_trial_outlasts_the_boot_of_its_type(cli: Any, faults: Any) -> None:
    """Or it is refused, with its price: a node of several GPUs may take 30 minutes to boot."""
    del cli.env["CLOUDDDP_YES"]  # the plan is shown, and nothing is created
    words = ("doctor", "--trial", "-t", "p5.48xlarge", "--max-cost", "30")
    assert "in 40 min 00 s: the nodes then" in cli.fails(2, *words, "--price", "30")
    err = cli.fails(2, *words, "--price", "55")
    assert "costs up to $36.69; max_cost is $30.00\n  -> give --max-cost 37, or --max-hours" in err
    assert "ImportKeyPair" not in faults.calls


def test_folder_where_no_report_can_be_written_is_refused(cli: Any, faults: Any) -> None:
    cli.cwd = Path("/proc/sys")  # which nobody may write to
    assert "cannot be written to /proc/sys" in cli.fails(2, "doctor", *CHECKED)
    assert faults.calls == []


def test_what_is_left_is_reported_and_named(cli: Any, ec2: Any, conditions: Any) -> None:
    conditions(reject={"DeleteSecurityGroup": {"code": "UnauthorizedOperation", "status": 403, "calls": 99}})
    err = cli.fails(3, "doctor", *CHECKED)
    report = report_in(cli.cwd)
    assert (report["result"], report["failed_in"], report["left"]) == ("failed", "down", True)
    (name,) = set(re.findall(r"-c (trial-[0-9a-f]{6}) down", err))
    conditions(clear=True)
    assert "1 security group deleted" in cli.ok("-c", name, "down", "-y")


def test_trial_that_is_declined_has_no_report(cli: Any, terminal: Any, faults: Any) -> None:
    """Type and price of the configuration do not count."""
    settings = 'nodes = 4\ninstance_type = "p5.48xlarge"\nprice = 0.1\nspot = true\nmax_cost = 900\n'
    cli.write("cloudddp.toml", f"[cluster]\n{settings}")
    del cli.env["CLOUDDDP_YES"]
    asked = terminal("doctor", "--trial")
    asked.read_until(b"Start these nodes? [y/N]")
    asked.wait_until_it_reads()
    os.write(asked.ours, b"n\n")
    code, shown = asked.read_to_the_end()
    assert code == 1
    assert "1 x g4dn.xlarge (1 x NVIDIA T4 each)" in shown
    assert "$0.53 per node (on-demand list price" in " ".join(shown.split())
    assert "RunInstances" not in faults.calls
    assert not list(cli.cwd.glob("*.json"))
