"""Tags, which everyone with ec2:CreateTags can write: decoded to bounded values; they cannot prevent
`down`."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tagged import tagged_instance

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
    "cloudddp:cluster-id": ["../../x", "c-0123456789\n", "c-01234567890", "c-٠١٢٣٤٥٦٧٨٩", "", "c-\x00"],
    "cloudddp:node-rank": ["²", "٣", "-1", "1.0", " 1", "1\n", "99999", "9" * 256, ""],
    "cloudddp:nodes": ["²", "0", "-2", "99999", ""],
    "cloudddp:gpus": ["²", "-1", "257", "", "all"],
    "cloudddp:usd-per-node-hour": ["nan", "inf", "-1", "1e9", "0.0000", "123456", "", "٣", "1\n"],
    "cloudddp:idle-minutes": ["nan", "-1", "0.00", "123456", "", "٣", " 5", "5\n", "never"],
    "cloudddp:created": ["2026-02-31T00:00:00Z", "0001-01-01T00:00:00Z", "2026-11-20T10:00:00+02:00"],
    "cloudddp:expires": ["never", "2026-11-20T10:00:00Z\n", "２０２６-11-20T10:00:00Z", "1e400", ""],
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


@settings(max_examples=30)
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


def test_cluster_with_changed_tags_is_shown_and_removed(cli: Any, ec2: Any, remains: Any) -> None:
    """With `cloudddp:cluster-id = ../../x`, `down` once deleted the key files of another folder. Beside it an
    instance for each tag, with a value that is not valid: all values are in the test of `decode`."""
    cli.ok("up", "-n", "2")
    cli.write("ok.py", "")
    victim = remains().instances[0]
    ec2.create_tags(Resources=[victim], Tags=[{"Key": "cloudddp:cluster-id", "Value": "²"}])
    listed = json.loads(cli.ok("status", "--json"))
    assert sorted(str(one["cluster_id"])[:2] for one in listed) == ["No", "c-"]
    assert "1 of 2 nodes" in cli.fails(1, "launch", "ok.py")
    home = Path(cli.env["CLOUDDDP_HOME"])
    other = home.parent / f"{cli.cluster}-x"
    other.mkdir()
    files = [other / name for name in ("id_ed25519", "host_key.pub", "known_hosts", "lock", "journal.jsonl")]
    for file in files:
        file.write_text("mine")
    path = {"Key": "cloudddp:cluster-id", "Value": f"../../{other.name}"}
    evil = {"Key": "cloudddp:owner", "Value": "user/x\u202e\u009b2J\u200b\ny"}
    ec2.create_tags(Resources=remains().groups, Tags=[path])
    ec2.create_tags(Resources=remains().instances[1:], Tags=[path, evil])
    instances = {}
    for key, values in BAD.items():
        instances[tagged_instance(ec2, cli.cluster, **{key.removeprefix("cloudddp:"): values[0]})] = key
    for words in (("status",), ("ls",), ("down", "-y")):
        done = cli.exits(0, *words)
        for text in (done.stdout, done.stderr):
            assert all(line.isprintable() for line in text.splitlines()), words
            assert not any(word in text for word in ("a bug", "$nan", "$inf", "$-")), words
    assert f"{len(instances) + 2} nodes terminated" in done.stdout
    for instance, key in instances.items():
        assert f"warning: instance {instance}: tag {key} = " in done.stderr
    assert remains().nothing
    assert [file.read_text() for file in files] == ["mine"] * len(files)
