"""Tags, which everyone with ec2:CreateTags can write: decoded to bounded values; they cannot prevent
`down`."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudddp import tags
from cloudddp.local_state import ClusterFolder
from cloudddp.tags import decode
from cloudddp.text import one_line

GOOD = {
    "cloudddp:cluster": "demo",
    "cloudddp:cluster-id": "c-0123456789",
    "cloudddp:owner": "user/alice",
    "cloudddp:created": "2026-11-20T12:00:00Z",
    "cloudddp:expires": "2026-11-20T14:00:00Z",
    "cloudddp:node-rank": "3",
    "cloudddp:nodes": "4",
    "cloudddp:gpus": "8",
    "cloudddp:usd-per-node-hour": "1.0274",
    "cloudddp:idle-minutes": "30.00",
}
BAD = {
    "cloudddp:cluster-id": [
        "../../x",
        "/etc",
        "c-../../../x",
        "c-0123456789/..",
        "c-0123456789\n",
        "c-012345678",
        "c-01234567890",
        "C-0123456789",
        "c-012345678g",
        "c-٠١٢٣٤٥٦٧٨٩",
        "",
        ".",
        "c-\x00",
        "x" * 256,
        "\u202ec-0123456789",
    ],
    "cloudddp:node-rank": [
        "²",
        "٣",
        "-1",
        "+1",
        "1.0",
        "1e3",
        " 1",
        "1\n",
        "99999",
        "9" * 256,
        "0x1",
        "",
        "①",
    ],
    "cloudddp:nodes": ["²", "0", "-2", "٤", "99999", "", "two"],
    "cloudddp:gpus": ["²", "-1", "257", "9999", "", "all"],
    "cloudddp:usd-per-node-hour": [
        "nan",
        "inf",
        "-inf",
        "-1",
        "+1",
        "1e9",
        "0",
        "0.0000",
        "1_000",
        "123456",
        "",
        "٣",
        " 1",
        "1\n",
        "0x1p3",
        "9" * 256,
    ],
    "cloudddp:idle-minutes": [
        "nan",
        "inf",
        "-1",
        "0",
        "0.00",
        "123456",
        "1e3",
        "",
        "٣",
        " 5",
        "5\n",
        "never",
    ],
    "cloudddp:created": [
        "2026-11-20T10:00:00",
        "2026-11-20",
        "2026-02-31T00:00:00Z",
        "0001-01-01T00:00:00Z",
        "9999-01-01T00:00:00Z",
        "2026-11-20T10:00:00+02:00",
        "２０２６-11-20T10:00:00Z",
        "2026-11-20T10:00:00Z\n",
        "",
        "now",
        "1e400",
    ],
    "cloudddp:expires": ["never", "9999-12-31T23:59:59Z", "2026-11-20T25:00:00Z", ""],
}
FIELDS = {
    "cloudddp:cluster-id": ("cluster_id", ""),
    "cloudddp:node-rank": ("node_rank", None),
    "cloudddp:nodes": ("nodes", None),
    "cloudddp:gpus": ("gpus", None),
    "cloudddp:usd-per-node-hour": ("price", None),
    "cloudddp:idle-minutes": ("idle_minutes", None),
    "cloudddp:created": ("created", None),
    "cloudddp:expires": ("expires", None),
}
CASES = [(key, value) for key, values in BAD.items() for value in values]


def pairs(**changes: str) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in {**GOOD, **changes}.items()]


def test_tags_round_trip() -> None:
    found = decode(pairs())
    assert (found.cluster, found.cluster_id, found.owner) == ("demo", "c-0123456789", "user/alice")
    assert found.created == datetime(2026, 11, 20, 12, tzinfo=UTC)
    assert found.expires == datetime(2026, 11, 20, 14, tzinfo=UTC)
    assert (found.node_rank, found.nodes, found.gpus, found.price) == (3, 4, 8, 1.0274)
    assert found.idle_minutes == 30
    assert found.unreadable == ()


@pytest.mark.parametrize(("key", "value"), CASES)
def test_invalid_value_is_ignored_and_listed(key: str, value: str) -> None:
    found = decode(pairs(**{key: value}))
    name, ignored = FIELDS[key]
    assert getattr(found, name) == ignored
    (text,) = found.unreadable
    assert key in text
    assert text.isprintable()
    assert len(text) < 200


def test_keys_are_case_sensitive_and_optional() -> None:
    other_case = [{"Key": key.upper(), "Value": "x"} for key in GOOD]
    assert decode([*other_case, *pairs()]) == decode(pairs())
    assert decode([]).cluster_id == ""
    assert decode([{"Key": "cloudddp:cluster"}, {}]).cluster_id == ""
    assert decode([{"Key": "cloudddp:cluster", "Value": "demo"}]).unreadable == (
        "tag cloudddp:cluster-id is missing",
    )


def test_text_is_safe_to_print() -> None:
    found = decode(pairs(**{"cloudddp:owner": "user/al\x1b[2Jice\u202e", "cloudddp:cluster": "a\nb\x9b"}))
    assert found.owner.isprintable()
    assert found.cluster.isprintable()


@given(st.lists(st.tuples(st.sampled_from(sorted(GOOD)), st.text(max_size=256))))
def test_any_text_decodes_to_bounded_values(written: list[tuple[str, str]]) -> None:
    found = decode([{"Key": key, "Value": value} for key, value in written])
    assert found.cluster_id == "" or tags.parse_cluster_id(found.cluster_id)
    assert found.node_rank is None or 0 <= found.node_rank <= 9999
    assert found.nodes is None or 1 <= found.nodes <= 9999
    assert found.gpus is None or 0 <= found.gpus <= tags.MAX_GPUS
    assert found.price is None or (math.isfinite(found.price) and 0 < found.price < 100_000)
    assert all(one_line(text) == text for text in (found.cluster, found.owner, *found.unreadable))


@pytest.mark.parametrize("text", BAD["cloudddp:cluster-id"])
def test_invalid_cluster_id_makes_no_folder(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="not a cluster id"):
        ClusterFolder(text, root=tmp_path)


# -- through the command line --------------------------------------------------------------------------------

# The values that EC2's XML can transport.
SENT = {key: [v for v in values if "\x00" not in v and len(v) <= 256] for key, values in BAD.items()}


@pytest.fixture
def tagged(cli: Any, ec2: Any) -> Any:
    """Start one instance of the test's cluster for each tag and value; return {id: (tag, value)}."""
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]

    def launch(tags: list[tuple[str, str | None]]) -> dict[str, tuple[str, str | None]]:
        answer = ec2.run_instances(
            ImageId=image, InstanceType="g5.xlarge", MinCount=len(tags), MaxCount=len(tags)
        )
        ids = [instance["InstanceId"] for instance in answer["Instances"]]
        written = {**GOOD, "cloudddp:cluster": cli.cluster, "cloudddp:owner": "user/moto"}
        del written["cloudddp:node-rank"]
        for instance, (key, value) in zip(ids, tags, strict=True):
            own = {**written, key: value}
            here = [{"Key": k, "Value": v} for k, v in own.items() if v is not None]
            ec2.create_tags(Resources=[instance], Tags=here)
        return dict(zip(ids, tags, strict=True))

    return launch


@pytest.mark.parametrize("which", ["cluster-id", "others"])
def test_invalid_tags_do_not_stop_status_and_down(cli: Any, tagged: Any, remains: Any, which: str) -> None:
    """An id in its every form, and two values of each other tag: all are in the test of `decode`."""
    of_cluster = {"cloudddp:cluster-id": SENT["cloudddp:cluster-id"]}
    others = {key: (values[0], values[-1]) for key, values in SENT.items() if key not in of_cluster}
    chosen = of_cluster if which == "cluster-id" else others
    instances = tagged([(key, value) for key, values in chosen.items() for value in {*values, None}])
    shown = cli("status")
    assert shown.returncode == 0, shown.stderr
    done = cli("down", "-y")
    assert done.returncode == 0, done.stderr
    assert f"{len(instances)} nodes terminated" in done.stdout
    assert remains().nothing
    for instance, (key, value) in instances.items():
        if value is not None:
            assert f"warning: instance {instance}: tag {key} = " in done.stderr
    for text in (shown.stdout, shown.stderr, done.stdout, done.stderr):
        assert "a bug" not in text
        assert all(line.isprintable() for line in text.splitlines())
        assert not any(word in text for word in ("$nan", "$inf", "$-"))


def test_down_ignores_paths_in_tags(cli: Any, ec2: Any, remains: Any) -> None:
    """With `cloudddp:cluster-id = ../../x`, `down` once deleted the key files of another folder."""
    cli.ok("up", "-n", "1")
    home = Path(cli.env["CLOUDDDP_HOME"])
    other = home.parent / f"{cli.cluster}-x"
    other.mkdir()
    files = [other / name for name in ("id_ed25519", "host_key.pub", "known_hosts", "lock", "journal.jsonl")]
    for file in files:
        file.write_text("mine")
    ec2.create_tags(
        Resources=[*remains().instances, *remains().groups],
        Tags=[{"Key": "cloudddp:cluster-id", "Value": f"../../{other.name}"}],
    )
    cli.ok("down", "-y")
    assert remains().nothing
    assert [file.read_text() for file in files] == ["mine"] * len(files)


def test_node_with_invalid_id_is_terminated_with_the_cluster(cli: Any, ec2: Any, remains: Any) -> None:
    cli.ok("up", "-n", "2")
    cli.write("ok.py", "")
    victim = remains().instances[0]
    ec2.create_tags(Resources=[victim], Tags=[{"Key": "cloudddp:cluster-id", "Value": "²"}])
    listed = json.loads(cli.ok("status", "--json"))
    assert sorted(str(one["cluster_id"])[:2] for one in listed) == ["No", "c-"]
    refused = cli("launch", "ok.py")
    assert refused.returncode == 1
    assert "1 of 2 nodes" in refused.stderr
    cli.ok("down", "-y")
    assert remains().nothing


def test_control_characters_in_tags_are_escaped(cli: Any, ec2: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    evil = "user/x\u202e\u009b2J\u200b\ny"
    ec2.create_tags(Resources=remains().instances, Tags=[{"Key": "cloudddp:owner", "Value": evil}])
    for words in (("status",), ("ls",), ("down", "-y")):
        done = cli(*words)
        assert done.returncode == 0, done.stderr
        for line in (done.stdout + done.stderr).splitlines():
            assert line.isprintable(), (words, line)
    assert remains().nothing
