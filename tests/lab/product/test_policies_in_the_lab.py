"""infra/iam/operator.json and read-only.json allow what the verbs call, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.harness import CommandLine, cannot, clean_environment, remaining
from support.permissions import (
    FOLDER,
    KEY,
    ON_FAILURE,
    READING,
    granted,
    run_every_verb,
)
from support.simlab import client_of

from cloudddp.simulator import control
from cloudddp.simulator.hosts import lab_namespaces
from cloudddp.simulator.iam.services import UNCHECKED


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """A simulator whose user has the operator's policy. Elastic IPs reach namespace nodes only."""
    if why := lab_namespaces.unavailable_reason():
        cannot(why)
    home = tmp_path_factory.mktemp("operator")
    yield control.start(home, nodes="namespace", policies={"policy": FOLDER / "operator.json"})
    control.stop(home)


@pytest.fixture(scope="module")
def needed(operator: control.Simulator, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The permissions that each verb needs. A verb that fails for lack of one names what to add."""
    env = clean_environment(
        CLOUDDDP_HOME=str(operator.home), CLOUDDDP_CLUSTER="verbs", CLOUDDDP_YES="1", CLOUDDDP_SIM="1"
    )
    try:
        return run_every_verb(CommandLine(tmp_path_factory.mktemp("project"), "verbs", env), operator)
    except AssertionError as error:
        called = set(control.permissions(operator).get(KEY, {})) - set(UNCHECKED)
        pytest.fail("\n".join([str(error), *differences("operator.json", {"this verb": called})]))


def differences(policy: str, needed: dict[str, set[str]]) -> list[str]:
    """Return what to change in a policy, so that it grants exactly what the verbs need."""
    used = {action for actions in needed.values() for action in actions}
    changes = [
        f"add {action} for {', '.join(verb for verb, actions in needed.items() if action in actions)}"
        for action in sorted(used - granted(policy))
    ]
    return changes + [
        f"remove {action}: no verb calls it (or have run_every_verb in tests/support/permissions.py do so)"
        for action in sorted(granted(policy) - used - set(ON_FAILURE))
    ]


def test_every_verb_works_for_the_operator_who_may_do_nothing_else(
    operator: control.Simulator, needed: dict[str, set[str]]
) -> None:
    changes = differences("operator.json", needed)
    assert not changes, "infra/iam/operator.json:\n" + "\n".join(changes)
    assert remaining(client_of(operator, "ec2"), "verbs").nothing


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
    assert added == "add ec2:CreateLaunchTemplate for up"
    assert removed.startswith("remove ec2:DeleteVolume")
