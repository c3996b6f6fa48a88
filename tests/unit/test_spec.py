"""Settings: their values, sources and limits, and the messages of errors. Nothing is called."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudddp.config import schema, settings
from cloudddp.config.checks import RESERVED_ENVIRONMENT
from cloudddp.config.descriptions import DESCRIPTIONS
from cloudddp.config.settings import Layer
from cloudddp.config.spec import JobSpec
from cloudddp.errors import UsageError


def one(section: str, key: str, value: Any, *, textual: bool = False) -> Any:
    """Return the value of a setting after validation."""
    config = settings.resolve([Layer("here", {section: {key: value}}, textual)])
    return getattr(getattr(config, section), key)


def refusal(section: str, key: str, value: Any, *, textual: bool = False) -> UsageError:
    with pytest.raises(UsageError) as caught:
        one(section, key, value, textual=textual)
    return caught.value


@pytest.mark.parametrize(
    "value",
    [
        "https://hooks.slack.com/services/T0/B0/x?thread=1@2",
        "http://localhost:8000",
        "${SLACK_WEBHOOK}",
        "python notify.py https://user:x@example.com",
    ],
)
def test_notify_is_a_url_a_command_or_a_variable(value: str) -> None:
    assert one("job", "notify", value, textual=True) == value


def as_variable(key: str) -> list[Layer]:
    return settings.environment_layers({f"CLOUDDDP_{key.upper()}": ""})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (" ", ": it is empty"),
        ("x" * 2001, ""),
        ("http://10.0.0.7/", ": http:// is for localhost"),
        ("http://127.0.0.7.example.com/", ": http:// is for localhost"),
        ("https://user:hunter2@example.com/", ": the URL has a user name"),
        ("https://example.com/a hunter2", ""),
        ("HTTPS://example.com/", ": the URL does not begin with https://"),
        (7, ""),
    ],
)
def test_other_values_of_notify_are_refused_and_not_shown(value: Any, why: str) -> None:
    message = str(refusal("job", "notify", value).message)
    assert message == f"here: job.notify = **** is not allowed{why}"


@pytest.mark.parametrize("key", ["notify", "container", "results_s3", "nodes_min"])
def test_empty_value_switches_a_setting_of_the_job_off_for_one_run(key: str) -> None:
    file = Layer("file", {"job": {"notify": "echo x", "container": "a", "nodes_min": 1}})
    assert getattr(settings.resolve([*as_variable(key), file]).job, key) is None


@pytest.mark.parametrize("key", ["max_cost", "reservation", "instance_profile", "kms_key"])
def test_empty_value_removes_no_limit_of_the_cluster(key: str) -> None:
    """CLOUDDDP_MAX_COST="$LIMIT", where LIMIT has not been set."""
    with pytest.raises(UsageError, match=rf"cluster\.{key} = '' is not allowed: it is empty"):
        settings.resolve(as_variable(key))


def test_missing_type_in_a_list_is_named() -> None:
    for value in ("p5.48xlarge,", ",p5.48xlarge", "p5.48xlarge,,p4d.24xlarge", ","):
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


@pytest.mark.parametrize(
    ("section", "key", "text", "value"),
    [
        ("cluster", "nodes", "3", 3),
        ("cluster", "max_hours", "0.5", 0.5),
        ("cluster", "spot", "true", True),
        ("cluster", "ssh_from", "10.0.0.1/32, 2001:db8::1/128", ("10.0.0.1/32", "2001:db8::1/128")),
        ("job", "nproc_per_node", "gpu", "gpu"),
        ("job", "nproc_per_node", "4,2", (4, 2)),
        ("job", "outputs", "runs, logs/a", ("runs", "logs/a")),
        ("job", "outputs", "2024", ("2024",)),
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
        ("cluster", "spot", "perhaps", True),
        ("job", "nproc_per_node", "4,x", True),
        ("cluster", "nodes", "3", False),
        ("cluster", "nodes", 3.0, False),
        ("cluster", "nodes", True, False),
        ("cluster", "spot", 1, False),
        ("job", "outputs", "runs", False),
        ("job", "env", {"A": 1}, False),
        ("job", "rendezvous", "etcd", False),
    ],
)
def test_value_of_another_type_is_refused(section: str, key: str, value: Any, textual: bool) -> None:
    refusal(section, key, value, textual=textual)


def test_text_in_a_file_is_what_the_flag_means() -> None:
    assert [one("job", "nproc_per_node", text) for text in ("2", "gpu", "2,1")] == [2, "gpu", (2, 1)]


def numeric_cases() -> Iterator[Any]:
    """Yield (section, key, value, valid) below, at and above each numeric limit."""
    for section in schema.SECTIONS:
        for key, hint in schema.fields(section).items():
            kind, metas = schema.unwrap(hint)
            if kind not in (int, float):
                continue
            step = 1 if kind is int else 1e-6
            for meta in metas:
                for limit, own, beside in (
                    (meta.ge, True, -step),
                    (meta.gt, False, step),
                    (meta.le, True, step),
                ):
                    if limit is not None:
                        yield section, key, kind(limit), own
                        yield section, key, kind(limit + beside), not own


@pytest.mark.parametrize(("section", "key", "value", "good"), list(numeric_cases()))
def test_numeric_limit(section: str, key: str, value: float, good: bool) -> None:
    for given, textual in ((value, False), (repr(value), True)):
        if good:
            assert one(section, key, given, textual=textual) == value
        else:
            assert f"{section}.{key}" in refusal(section, key, given, textual=textual).message


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
        ("cluster", "max_hours", 336.1),
        ("cluster", "max_cost", 0.0),
        ("cluster", "price", 0.0),
        ("cluster", "disk_gb", 7),
        ("cluster", "ssh_port", 0),
        ("job", "nproc_per_node", [1, 0]),
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


def test_plain_names_and_paths_are_accepted() -> None:
    for name in ("a", "7", "a-1", "a" * 40):
        assert one("cluster", "name", name) == name
    for path in ("a", "a/b", "..a", "a..", "a/..b/c", ".hidden", "with space"):
        assert one("job", "outputs", [path]) == (path,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("instance_type", "g5"),
        ("instance_type", "g5.xlarge; id"),
        ("region", "us-east-1\n"),
        ("zones", ["us-west-2-lax-1"]),
        ("regions", "us-east-1,nowhere"),
        ("idle_minutes", 4.9),
        ("wait_capacity", "15d"),
        ("user", "root; id"),
        ("ssh_from", ["203.0.113.7"]),
        ("kms_key", ""),
        ("kms_key", "alias/"),
        ("instance_profile", "a b"),
        ("reservation", "reserved"),
    ],
)
def test_invalid_ids_and_names_are_refused(key: str, value: Any) -> None:
    assert refusal("cluster", key, value).hint.startswith("allowed: ")


@pytest.mark.parametrize("path", ["/etc", "~/x", "..", "../x", "a/../b", "a/..", ""])
@pytest.mark.parametrize(("section", "key"), [("job", "outputs"), ("setup", "inputs")])
def test_path_outside_the_project_is_refused(section: str, key: str, path: str) -> None:
    refusal(section, key, [path])


def test_invalid_name_or_value_of_a_variable_is_refused() -> None:
    for name in ("1A", "A-B", "A B", "", "A=B", "A\n", "Ä"):
        assert "job.env" in refusal("job", "env", {name: "x"}).message
    for name in RESERVED_ENVIRONMENT:
        assert name in refusal("job", "env", {name: "0"}).message
    refusal("job", "env", {"A": "x\0y"})


@pytest.mark.parametrize(
    "option", ["--nnodes=2", "--rdzv_id=x", "--nproc", "-m", "--no-python", "train.py", "--"]
)
def test_option_of_torchrun_that_cloudddp_sets_is_refused(option: str) -> None:
    message = refusal("job", "torchrun_args", [option]).message
    assert f"job.torchrun_args: {option}" in message.replace("'", "")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[cluster]\nnodes = 0\n", "cluster.nodes = 0", "allowed: a whole number from 1 to 256"),
        ("[cluster]\nnodse = 2", "unknown key cluster.nodse", "'nodes'"),
        ("[clustr]\nnodes = 2", "'clustr'", "'cluster'"),
        ("[job]\nnodes = 2", "unknown key job.nodes", "[cluster]"),
        ("nodes = 2", "'nodes'", "[cluster]"),
        ("cluster = 2", "cluster must be a table", "[cluster]"),
        ("[zzz]\n", "'zzz'", "cluster, data, job, setup, shared, sync"),
    ],
)
def test_error_names_the_file_and_the_key_and_what_is_allowed(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        settings.resolve([settings.read_toml(path)])
    assert (message in caught.value.message, str(path) in caught.value.message) == (True, True)
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *(
            (content, "not valid TOML")
            for content in (b"nodes = ", b"[cluster", b"\xff\xfe", b"{}", b"nodes: 2")
        ),
        (b"[cluster]\nnodes = 2\nnodes = 4  # again\n", r"line 3, column \d+\): nodes = 4  # again$"),
        (b'[job]\nnotify = "https://example.com/hunter2\n', r"\*\*\*\*$"),  # it may be secret
        (b'[job]\nenv = { TOKEN = "hunter2\n', r"\*\*\*\*$"),
        (None, "broken.toml"),
    ],
)
def test_invalid_toml_is_refused_with_the_file_name(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=why) as caught:
        settings.read_toml(path)
    assert (str(path) in caught.value.message, "hunter2" in caught.value.message) == (True, False)


def test_every_setting_has_help_and_a_description_of_allowed_values() -> None:
    for section in schema.SECTIONS:
        for key, hint in schema.fields(section).items():
            assert DESCRIPTIONS[section][key].endswith("."), f"{section}.{key}"
            assert schema.allowed(hint), f"{section}.{key}"
