"""Settings: their values, sources and limits, and the messages of errors. Nothing is called."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudddp.config import schema, settings
from cloudddp.config.descriptions import DESCRIPTIONS
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config, JobSpec
from cloudddp.config.value_checks import RESERVED_ENVIRONMENT
from cloudddp.errors import UsageError


def one(section: str, key: str, value: Any, *, textual: bool = False) -> Any:
    """Return the value of a setting after validation."""
    config = settings.resolve([Layer("here", {section: {key: value}}, textual)])
    return getattr(getattr(config, section), key)


def refusal(section: str, key: str, value: Any, *, textual: bool = False) -> UsageError:
    with pytest.raises(UsageError) as caught:
        one(section, key, value, textual=textual)
    return caught.value


def from_file(folder: Path, text: str) -> Config:
    path = folder / "cloudddp.toml"
    path.write_text(text)
    return settings.resolve([settings.read_toml(path)])


def file_refusal(folder: Path, text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        from_file(folder, text)
    return caught.value


# -- whom a job notifies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "https://hooks.slack.com/services/T0/B0/x?thread=1@2",
        "https://[2001:db8::1]:8443/a",
        "http://localhost:8000",
        "http://127.0.0.1:80?a",
        "$SLACK_WEBHOOK",
        "${SLACK_WEBHOOK}",
        "python notify.py https://user:x@example.com",
        "echo x",
    ],
)
def test_notify_is_a_url_a_command_or_a_variable(value: str) -> None:
    assert one("job", "notify", value, textual=True) == value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (" ", ": it is empty"),
        ("a\nb", ""),
        ("x" * 2001, ""),
        ("http://example.com/", ": http:// is for localhost"),
        ("http://10.0.0.7/", ": http:// is for localhost"),
        ("http://127.0.0.7.example.com/", ": http:// is for localhost"),
        ("https://user@example.com/hunter2", ": the URL has a user name"),
        ("https://user:hunter2@example.com/", ": the URL has a user name"),
        ("https:///hunter2", ""),
        ("https://example.com/a hunter2", ""),
        ("https://example.com/a\n", ": it begins or ends with a space"),
        ("https://example.com:port/", ""),
        ("HTTPS://example.com/", ": the URL does not begin with https://"),
        ("ftp://example.com/", ": the URL does not begin with https://"),
        (7, ""),
    ],
)
def test_other_values_of_notify_are_refused_and_not_shown(value: Any, why: str) -> None:
    message = str(refusal("job", "notify", value).message)
    assert message == f"here: job.notify = **** is not allowed{why}"


@pytest.mark.parametrize("key", ["notify", "container", "results_s3", "nodes_min"])
def test_empty_value_switches_a_setting_of_the_job_off_for_one_run(key: str) -> None:
    file = Layer("file", {"job": {"notify": "echo x", "container": "a", "nodes_min": 1}})
    variable = settings.environment_layers({f"CLOUDDDP_{key.upper()}": ""})
    assert getattr(settings.resolve([*variable, file]).job, key) is None


@pytest.mark.parametrize("key", ["max_cost", "reservation", "instance_profile", "kms_key"])
def test_empty_value_removes_no_limit_of_the_cluster(key: str) -> None:
    """CLOUDDDP_MAX_COST="$LIMIT", where LIMIT has not been set."""
    with pytest.raises(UsageError, match=rf"cluster\.{key} = '' is not allowed: it is empty"):
        settings.resolve(settings.environment_layers({f"CLOUDDDP_{key.upper()}": ""}))


@pytest.mark.parametrize("value", ["p5.48xlarge,", ",p5.48xlarge", "p5.48xlarge,,p4d.24xlarge", ","])
def test_missing_type_in_a_list_is_named(value: str) -> None:
    message = str(refusal("cluster", "instance_type", value, textual=True).message)
    assert message.endswith("is not allowed: there is nothing beside a comma")


def test_notify_takes_a_variable_of_the_job() -> None:
    env = {"HOOK": "https://example.com/x", "BAD": "http://example.com/hunter2"}
    assert JobSpec(notify="${HOOK}", env=env).notify_target == env["HOOK"]
    assert (JobSpec().notify_target, JobSpec(notify="$HOME/x").notify_target) == ("", "$HOME/x")
    for name in ("BAD", "NONE"):
        with pytest.raises(UsageError, match=f"variable {name}") as caught:
            _ = JobSpec(notify=f"${name}", env=env).notify_target
        assert "hunter2" not in f"{caught.value.message} {caught.value.hint}"


# -- text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "key", "text", "value"),
    [
        ("cluster", "nodes", "3", 3),
        ("cluster", "max_hours", "0.5", 0.5),
        ("cluster", "max_cost", "1e2", 100.0),
        ("cluster", "spot", "true", True),
        ("cluster", "spot", "false", False),
        ("cluster", "region", "eu-west-1", "eu-west-1"),
        ("cluster", "ssh_from", "10.0.0.1/32, 2001:db8::1/128", ("10.0.0.1/32", "2001:db8::1/128")),
        ("job", "nproc_per_node", "gpu", "gpu"),
        ("job", "nproc_per_node", "4", 4),
        ("job", "nproc_per_node", "4,2", (4, 2)),
        ("job", "outputs", "runs", ("runs",)),
        ("job", "outputs", "runs, logs/a", ("runs", "logs/a")),
        ("job", "outputs", "2024", ("2024",)),
        ("job", "python", "3", "3"),
        ("sync", "exclude", "", ()),
        ("sync", "exclude", "*.pt,7", ("*.pt", "7")),
    ],
)
def test_text_is_converted_to_the_type_of_the_setting(section: str, key: str, text: str, value: Any) -> None:
    found = one(section, key, text, textual=True)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("section", "key", "value", "textual"),
    [
        ("cluster", "nodes", "two", True),
        ("cluster", "nodes", "2.5", True),
        ("cluster", "nodes", "", True),
        ("cluster", "nodes", "9" * 40, True),
        ("cluster", "spot", "perhaps", True),
        ("cluster", "region", "", True),
        ("job", "nproc_per_node", "4,x", True),
        ("job", "nproc_per_node", "-1", True),
        ("job", "nproc_per_node", "cpu", True),
        ("cluster", "nodes", "3", False),
        ("cluster", "nodes", 3.0, False),
        ("cluster", "nodes", True, False),
        ("cluster", "spot", 1, False),
        ("cluster", "region", 5, False),
        ("job", "outputs", "runs", False),
        ("job", "env", {"A": 1}, False),
        ("job", "env", "A=1", False),
        ("job", "nproc_per_node", True, False),
        ("job", "rendezvous", "etcd", False),
    ],
)
def test_value_of_another_type_is_refused(section: str, key: str, value: Any, textual: bool) -> None:
    refusal(section, key, value, textual=textual)


def test_text_in_a_file_is_what_the_flag_means() -> None:
    assert [one("job", "nproc_per_node", text) for text in ("2", "gpu", "2,1")] == [2, "gpu", (2, 1)]


# -- limits --------------------------------------------------------------------------------------------------


def numeric_cases() -> Iterator[Any]:
    """Yield (section, key, value, valid) below, at and above each numeric limit."""
    for section in schema.SECTIONS:
        for key, hint in schema.fields(section).items():
            kind, metas = schema.unwrap(hint)
            if kind not in (int, float):
                continue
            step = 1 if kind is int else 1e-6
            for meta in metas:
                if meta.ge is not None:
                    yield section, key, kind(meta.ge), True
                    yield section, key, kind(meta.ge - step), False
                if meta.gt is not None:
                    yield section, key, kind(meta.gt), False
                    yield section, key, kind(meta.gt + step), True
                if meta.le is not None:
                    yield section, key, kind(meta.le), True
                    yield section, key, kind(meta.le + step), False


@pytest.mark.parametrize(("section", "key", "value", "good"), list(numeric_cases()))
def test_numeric_limit(section: str, key: str, value: float, good: bool) -> None:
    if good:
        assert one(section, key, value) == value
        assert one(section, key, repr(value), textual=True) == value
    else:
        assert f"{section}.{key}" in refusal(section, key, value).message
        assert f"{section}.{key}" in refusal(section, key, repr(value), textual=True).message


def test_every_number_has_a_lower_limit() -> None:
    numbers = {
        (section, key)
        for section in schema.SECTIONS
        for key, hint in schema.fields(section).items()
        if schema.unwrap(hint)[0] in (int, float)
    }
    limited = {(section, key) for section, key, _, good in numeric_cases() if not good}
    assert numbers == limited
    assert len(numbers) >= 11


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("cluster", "nodes", 0),
        ("cluster", "nodes", 257),
        ("cluster", "max_hours", 0.0),
        ("cluster", "max_hours", -1.0),
        ("cluster", "max_hours", 336.1),
        ("cluster", "max_cost", 0.0),
        ("cluster", "price", 0.0),
        ("cluster", "disk_gb", 7),
        ("cluster", "volume_init_rate", 99),
        ("cluster", "ssh_port", 65536),
        ("cluster", "ssh_port", 0),
        ("job", "nproc_per_node", 0),
        ("job", "nproc_per_node", 257),
        ("job", "nproc_per_node", [1, 0]),
        ("job", "master_port", 65536),
        ("job", "stop_grace", -0.1),
        ("sync", "max_mb", 0.0),
    ],
)
def test_limits_that_protect_the_bill_and_the_nodes(section: str, key: str, value: Any) -> None:
    refusal(section, key, value)


@pytest.mark.parametrize("key", ["max_hours", "max_cost", "price", "ready_minutes"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(key: str, value: float) -> None:
    refusal("cluster", key, value)
    refusal("cluster", key, str(value), textual=True)


@pytest.mark.parametrize(
    "name", ["", "A", "-a", "a" * 41, "a b", "a;rm -rf ~", "$(id)", "a`id`", "a'b", 'a"b', "a\nb", "a\n", "ä"]
)
def test_unsafe_cluster_name_is_refused(name: str) -> None:
    error = refusal("cluster", "name", name)
    assert "cluster.name" in error.message
    assert repr(name) in error.message


@pytest.mark.parametrize("name", ["a", "7", "a-1", "a" * 40])
def test_plain_cluster_name_is_accepted(name: str) -> None:
    assert one("cluster", "name", name) == name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("instance_type", "g5"),
        ("instance_type", "g5.xlarge; id"),
        ("region", "us_east_1"),
        ("region", "us-east-1\n"),
        ("zones", ["us-east-1"]),
        ("zones", ["us-west-2-lax-1"]),
        ("subnets", ["vpc-0abc"]),
        ("vpc", "Name=training"),
        ("regions", "us-east-1,nowhere"),
        ("idle_minutes", 4.9),
        ("wait_capacity", "2 hours"),
        ("wait_capacity", "15d"),
        ("wait_capacity", "20161m"),
        ("vpc", "vpc-xyz"),
        ("image", "ubuntu"),
        ("user", "root; id"),
        ("ssh_from", ["203.0.113.7"]),
        ("ssh_from", ["everyone/0"]),
        ("kms_key", ""),
        ("kms_key", "train"),
        ("kms_key", "alias/"),
        ("kms_key", "arn:aws:kms:us-east-1:1:key/a"),
        ("instance_profile", "a b"),
        ("instance_profile", "arn:aws:iam::123456789012:role/train"),
        ("instance_profile", "x" * 129),
        ("reservation", "reserved"),
    ],
)
def test_invalid_ids_and_names_are_refused(key: str, value: Any) -> None:
    assert refusal("cluster", key, value).hint.startswith("allowed: ")


@pytest.mark.parametrize("path", ["/etc", "~/x", "..", "../x", "a/../b", "a/..", ""])
@pytest.mark.parametrize(("section", "key"), [("job", "outputs"), ("setup", "inputs")])
def test_path_outside_the_project_is_refused(section: str, key: str, path: str) -> None:
    refusal(section, key, [path])


@pytest.mark.parametrize("path", ["a", "a/b", "..a", "a..", "a/..b/c", ".hidden", "with space"])
def test_path_inside_the_project_is_accepted(path: str) -> None:
    assert one("job", "outputs", [path]) == (path,)


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "", "A=B", "A\n", "Ä"])
def test_invalid_variable_name_is_refused(name: str) -> None:
    assert "job.env" in refusal("job", "env", {name: "x"}).message


def test_nul_in_a_value_is_refused() -> None:
    refusal("job", "env", {"A": "x\0y"})


@pytest.mark.parametrize(
    "option", ["--nnodes=2", "--rdzv_id=x", "--nproc", "-m", "--no-python", "train.py", "--"]
)
def test_option_of_torchrun_that_cloudddp_sets_is_refused(option: str) -> None:
    layer = settings.Layer("cloudddp.toml", {"job": {"torchrun_args": [option]}})
    with pytest.raises(UsageError) as refused:
        settings.resolve([layer])
    assert f"job.torchrun_args has {option}" in refused.value.message.replace("'", "")


@pytest.mark.parametrize("name", sorted(RESERVED_ENVIRONMENT))
def test_reserved_variable_is_refused(name: str) -> None:
    assert name in refusal("job", "env", {name: "0"}).message


# -- messages ----------------------------------------------------------------------------------------


def test_error_names_file_key_value_and_what_is_allowed(tmp_path: Path) -> None:
    error = file_refusal(tmp_path, "[cluster]\nnodes = 0\n")
    for part in (str(tmp_path / "cloudddp.toml"), "cluster.nodes", "0"):
        assert part in error.message
    assert error.hint == "allowed: a whole number from 1 to 256"
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[cluster]\nnodse = 2", "unknown key cluster.nodse", "'nodes'"),
        ("[clustr]\nnodes = 2", "'clustr'", "'cluster'"),
        ("[job]\nnodes = 2", "unknown key job.nodes", "[cluster]"),
        ("[cluster]\nexclude = []", "unknown key cluster.exclude", "[sync]"),
        ("nodes = 2", "'nodes'", "[cluster]"),
        ("[env]\nA = '1'", "'env'", "[job]"),
        ("cluster = 2", "cluster must be a table", "[cluster]"),
        ("[[cluster]]\nnodes = 2", "cluster must be a table", "[cluster]"),
        ("[zzz]\n", "'zzz'", "cluster, data, job, setup, shared, sync"),
    ],
)
def test_misplaced_or_misspelt_name_gets_a_suggestion(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    error = file_refusal(tmp_path, text)
    assert message in error.message
    assert str(tmp_path / "cloudddp.toml") in error.message
    assert hint in error.hint


@pytest.mark.parametrize("content", [b"nodes = ", b"[cluster", b"\xff\xfe", b"{}", b"nodes: 2"])
def test_invalid_toml_is_refused_with_the_file_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not valid TOML") as caught:
        settings.read_toml(path)
    assert str(path) in caught.value.message


def test_invalid_toml_is_refused_with_the_text_of_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[cluster]\nnodes = 2\nnodes = 4  # again\n")
    with pytest.raises(UsageError, match=r"line 3, column \d+\): nodes = 4  # again$"):
        settings.read_toml(path)


def test_invalid_toml_is_refused_without_what_may_be_secret(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    for text in ('notify = "https://example.com/hunter2', 'env = { TOKEN = "hunter2'):
        path.write_text(f"[job]\n{text}\n")
        with pytest.raises(UsageError, match=r"\*\*\*\*$") as caught:
            settings.read_toml(path)
        assert "hunter2" not in caught.value.message


def test_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml"):
        settings.read_toml(tmp_path / "absent.toml")


def test_every_setting_has_help_and_a_description_of_allowed_values() -> None:
    for section in schema.SECTIONS:
        for key, hint in schema.fields(section).items():
            assert DESCRIPTIONS[section][key].endswith("."), f"{section}.{key}"
            assert schema.allowed(hint), f"{section}.{key}"
