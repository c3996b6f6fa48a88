"""Which source of a setting wins: an option, a variable, a file; and which variables are settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudddp.agent import protocol
from cloudddp.config import schema, settings, spec, timing
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_bytes(b"\xef\xbb\xbf[cluster]\nnodes = 3\n")
    assert settings.resolve([settings.read_toml(path)]).cluster.nodes == 3


def test_source_with_the_highest_precedence_wins() -> None:
    flag = Layer("--nodes", {"cluster": {"nodes": "5"}}, textual=True)
    environment = settings.environment_layers({"CLOUDDDP_NODES": "4", "CLOUDDDP_DISK_GB": "400"})
    file = Layer("cloudddp.toml", {"cluster": {"nodes": 3, "disk_gb": 300, "zones": ["us-east-1c"]}})
    user = Layer(
        "config.toml", {"cluster": {"nodes": 2, "disk_gb": 200, "zones": "us-east-1b", "user": "ec2-user"}}
    )
    chosen = settings.resolve([flag, *environment, file, user]).cluster
    assert (chosen.nodes, chosen.disk_gb, chosen.zones, chosen.user) == (5, 400, ("us-east-1c",), "ec2-user")
    assert chosen.instance_type == spec.ClusterSpec().instance_type


def test_bad_value_is_refused_even_if_overridden() -> None:
    with pytest.raises(UsageError, match=r"config\.toml"):
        settings.resolve(
            [Layer("flag", {"cluster": {"nodes": 1}}), Layer("config.toml", {"cluster": {"nodes": 0}})]
        )


def test_no_source_gives_the_defaults() -> None:
    assert settings.resolve([]) == Config()


def test_env_tables_merge_by_name() -> None:
    flag = Layer("--env", {"job": {"env": {"A": "flag"}}}, textual=True)
    file = Layer("file", {"job": {"env": {"A": "file", "B": "file"}}})
    user = Layer("user", {"job": {"env": {"B": "user", "C": "user"}}})
    assert settings.resolve([flag, file, user]).job.env == {"A": "flag", "B": "file", "C": "user"}


def test_lists_are_replaced_not_merged() -> None:
    stronger, weaker = (
        Layer("a", {"sync": {"exclude": ["x"]}}),
        Layer("b", {"sync": {"exclude": ["y", "z"]}}),
    )
    assert settings.resolve([stronger, weaker]).sync.exclude == ("x",)


def test_every_setting_except_tables_has_a_variable() -> None:
    names = [
        settings.variable_of(section, key)
        for section in schema.SECTIONS
        if section not in schema.LISTS
        for key in schema.fields(section)
    ]
    named = [name for name in names if name]
    assert len(named) == len(set(named)) == len(names) - len(settings.TABLES)
    assert not {name.removeprefix("CLOUDDDP_") for name in named} & settings.OTHER_VARIABLES


def test_variables_that_are_not_settings_are_ignored() -> None:
    environ = {
        "PATH": "/bin",
        "CLOUDDDP_HOME": "x",
        "CLOUDDDP_JOB_ID": "y",
        "CLOUDDDPX": "z",
        timing.VARIABLE: "1",
    }
    assert settings.environment_layers(environ) == []


def test_misspelt_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="CLOUDDDP_MAXCOST") as caught:
        settings.environment_layers({"CLOUDDDP_MAXCOST": "10"})
    assert "'CLOUDDDP_MAX_COST'" in caught.value.hint


def test_error_in_a_variable_names_the_variable() -> None:
    layers = settings.environment_layers({"CLOUDDDP_MAX_HOURS": "forever"})
    with pytest.raises(UsageError) as caught:
        settings.resolve(layers)
    assert "CLOUDDDP_MAX_HOURS" in caught.value.message
    assert "'forever'" in caught.value.message
    assert "at most 336" in caught.value.hint
    with pytest.raises(UsageError, match="CLOUDDDP_OUTPUTS"):
        settings.resolve(settings.environment_layers({"CLOUDDDP_OUTPUTS": "runs,\udcff"}))


def test_variables_of_ranks_are_no_misspelt_settings() -> None:
    """A rank may call cloudddp."""
    of_ranks = {
        protocol.TASK_VARIABLE,
        protocol.ATTEMPT_VARIABLE,
        protocol.STATUS_VARIABLE,
        protocol.STEP_VARIABLE,
    }
    assert {name.removeprefix("CLOUDDDP_") for name in of_ranks} <= settings.OTHER_VARIABLES
