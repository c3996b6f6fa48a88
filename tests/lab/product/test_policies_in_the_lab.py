"""infra/iam/operator.json and read-only.json allow what the verbs call, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import CommandLine, cannot, clean_environment, remaining
from support.permissions import (
    FOLDER,
    IS_CLUSTER,
    KEY,
    ON_FAILURE,
    READING,
    TAG,
    granted,
    run_every_verb,
    statement_for,
)
from support.simlab import client_of

from cloudddp.sim import control
from cloudddp.sim.hosts import lab_namespaces

SUM = """
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
if dist.get_rank() == 0:
    pathlib.Path("runs").mkdir(exist_ok=True)
    pathlib.Path("runs/sum").write_text(str(int(x)))
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort the interpreter's shutdown
"""


def start(folder: Path, policy: str = "") -> control.Simulator:
    """Start a simulator with namespace nodes: Elastic IPs reach no other ones."""
    if why := lab_namespaces.unavailable_reason():
        cannot(why)
    files = {"policy": FOLDER / policy} if policy else {}
    return control.start(folder / "home", nodes="namespace", policies=files)


def command_line(sim: control.Simulator, cluster: str) -> CommandLine:
    folder = sim.home.parent / cluster
    folder.mkdir()
    env = clean_environment(
        CLOUDDDP_HOME=str(sim.home), CLOUDDDP_CLUSTER=cluster, CLOUDDDP_YES="1", CLOUDDDP_SIM="1"
    )
    return CommandLine(folder, cluster, env)


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """The permissions that each verb needs, recorded with full access."""
    sim = start(tmp_path_factory.mktemp("full"))
    try:
        yield run_every_verb(command_line(sim, "full"), sim)
    finally:
        control.stop(sim.home)


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """A simulator whose user has the operator's policy."""
    sim = start(tmp_path_factory.mktemp("operator"), "operator.json")
    yield sim
    control.stop(sim.home)


def differences(policy: str, needed: dict[str, set[str]]) -> list[str]:
    """Return what to change in a policy, so that it grants exactly what the verbs need."""
    used = {action for actions in needed.values() for action in actions}
    changes = [
        f"add {action}, which {', '.join(verb for verb, actions in needed.items() if action in actions)} "
        "calls:\n"
        f"  {json.dumps(statement_for(action))}"
        for action in sorted(used - granted(policy))
    ]
    return changes + [
        f"remove {action}: no verb calls it (or have run_every_verb in tests/support/permissions.py do so)"
        for action in sorted(granted(policy) - used - set(ON_FAILURE))
    ]


def test_operator_policy_grants_what_the_verbs_call(needed: dict[str, set[str]]) -> None:
    changes = differences("operator.json", needed)
    assert not changes, "infra/iam/operator.json:\n" + "\n".join(changes)


def test_read_only_policy_grants_what_reading_verbs_call(needed: dict[str, set[str]]) -> None:
    changes = differences("read-only.json", {verb: needed[verb] for verb in READING})
    assert not changes, "infra/iam/read-only.json:\n" + "\n".join(changes)


def test_differences_are_named(needed: dict[str, set[str]]) -> None:
    """So that the tests above can fail, and say how to change the policy."""
    more = {
        **needed,
        "up": needed["up"] | {"ec2:CreateLaunchTemplate"},
        "down": needed["down"] - {"ec2:DeleteVolume"},
    }
    changes = set(differences("operator.json", more)) - set(differences("operator.json", needed))
    added, removed = sorted(changes)
    assert added.startswith("add ec2:CreateLaunchTemplate, which up calls:")
    assert json.loads(added.partition("\n")[2]) == {
        "Effect": "Allow",
        "Action": "ec2:CreateLaunchTemplate",
        "Resource": ["arn:aws:ec2:*:*:launch-template/*"],
        "Condition": {"StringLike": {f"aws:RequestTag/{TAG}": IS_CLUSTER}},
    }
    assert removed.startswith("remove ec2:DeleteVolume")


def test_recorder_saw_calls_of_every_verb(needed: dict[str, set[str]]) -> None:
    assert {"ec2:RunInstances", "ec2:CreateTags", "ec2:ImportKeyPair", "ssm:GetParameter"} <= needed["up"]
    assert {"ec2:TerminateInstances", "ec2:DeleteVolume", "ec2:DeleteNetworkInterface"} <= needed["down"]
    assert "ec2:RevokeSecurityGroupIngress" in needed["allow-me"]
    assert [verb for verb, actions in needed.items() if not actions] == []


@pytest.mark.timeout(600)
def test_every_verb_works_for_the_operator(operator: control.Simulator) -> None:
    run_every_verb(command_line(operator, "verbs"), operator)
    assert remaining(client_of(operator, "ec2"), "verbs").nothing


@pytest.mark.torch
def test_training_as_the_operator(operator: control.Simulator) -> None:
    pytest.importorskip("torch")
    cli = command_line(operator, "training")
    cli.write("sum.py", SUM)
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    cli.ok("launch", "--nproc-per-node", "2", "sum.py")
    cli.ok("pull")
    (brought,) = (cli.cwd / "results").rglob("runs/sum")
    assert brought.read_text() == "6"
    cli.ok("down", "-y")
    assert remaining(client_of(operator, "ec2"), "training").nothing
    assert set(control.permissions(operator)[KEY]) <= granted("operator.json") | {"sts:GetCallerIdentity"}
