"""The tags of a cluster's resources: their names, and their values decoded into typed, bounded fields. Pure.

Everyone with ec2:CreateTags can write these values, so a value that is not in the form that `up` writes is
ignored and listed in `unreadable`. Text is safe to print. Only a valid cluster id may become part of a local
path (local_state.ClusterFolder); `cluster_id` is '' where the tag holds none.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from cloudddp.text import one_line

TAG_CLUSTER = "cloudddp:cluster"
TAG_ID = "cloudddp:cluster-id"
TAG_OWNER = "cloudddp:owner"
TAG_CREATED = "cloudddp:created"
TAG_EXPIRES = "cloudddp:expires"
TAG_VERSION = "cloudddp:version"
# Only where EC2's launch index is not the rank: see cluster/model.py.
TAG_NODE_RANK = "cloudddp:node-rank"
TAG_NODES = "cloudddp:nodes"  # the number of nodes that the cluster was created with
TAG_GPUS = "cloudddp:gpus"  # of each node, by its instance type
TAG_EFA = "cloudddp:efa"  # EFA devices of each node, as its launch requested them
TAG_REQUIRE_EFA = "cloudddp:require-efa"  # `yes` on the nodes of a cluster that requires EFA
TAG_IDLE = "cloudddp:idle-minutes"  # of the nodes of a cluster with idle_minutes
TAG_PRICE = "cloudddp:usd-per-node-hour"  # disk and public address included

# [0-9], not \d: that matches the digits of every script, and str.isdigit() accepts '²', which int() rejects.
_ID = re.compile(r"c-[0-9a-f]{10}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_COUNT = re.compile(r"[0-9]{1,4}")
_AMOUNT = re.compile(r"[0-9]{1,5}(\.[0-9]{1,6})?")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_ISO = "%Y-%m-%dT%H:%M:%SZ"
_YEARS = range(2020, 2200)  # rejects invalid years, which would give a wrong but plausible cost
MAX_GPUS = 256  # more than any machine has
_SHOWN = 60  # characters of a value in a warning
_MAX_VALUE = 256  # characters of a value, as in EC2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one resource. `cluster` and `owner` are always safe to print."""

    cluster: str = ""
    cluster_id: str = ""  # c- and ten hexadecimal digits, or ''
    owner: str = ""
    created: datetime | None = None
    expires: datetime | None = None
    node_rank: int | None = None
    nodes: int | None = None  # number of nodes that the cluster was created with, at least 1
    gpus: int | None = None  # of each node, by its instance type; 0 to MAX_GPUS
    price: float | None = None  # USD per node and hour; finite, above 0
    efa: int | None = None  # EFA devices of each node, as requested
    require_efa: bool = False
    idle_minutes: float | None = None  # finite, above 0
    # For example "tag cloudddp:node-rank = '²' cannot be read ..."; the caller's warning names the resource.
    unreadable: tuple[str, ...] = ()


def decode(pairs: Iterable[Mapping[str, Any]]) -> Tags:
    """Return the tags in a list of {"Key": ..., "Value": ...}, as AWS returns it. Never raises.

    Keys are case-sensitive, as in EC2: `Cloudddp:Cluster` is a different tag.
    """
    texts = {str(pair.get("Key", "")): str(pair.get("Value", "")) for pair in pairs}
    unreadable: list[str] = []

    def read(key: str, parse: Any) -> Any:
        text = texts.get(key)
        if text is None:
            return None
        value = parse(text)
        if value is None:
            unreadable.append(f"tag {key} = '{one_line(text, _SHOWN)}' cannot be read and is ignored")
        return value

    name = texts.get(TAG_CLUSTER, "")
    if name and not _NAME.fullmatch(name):
        unreadable.append(f"tag {TAG_CLUSTER} = '{one_line(name, _SHOWN)}' is not a valid cluster name")
    if TAG_CLUSTER in texts and TAG_ID not in texts:
        unreadable.append(f"tag {TAG_ID} is missing")
    return Tags(
        cluster=one_line(name, _MAX_VALUE),
        cluster_id=read(TAG_ID, parse_cluster_id) or "",
        owner=one_line(texts.get(TAG_OWNER, ""), _MAX_VALUE),
        created=read(TAG_CREATED, parse_time),
        expires=read(TAG_EXPIRES, parse_time),
        node_rank=read(TAG_NODE_RANK, parse_count),
        nodes=read(TAG_NODES, lambda text: parse_count(text) or None),
        gpus=read(TAG_GPUS, lambda text: parse_count(text, MAX_GPUS)),
        price=read(TAG_PRICE, parse_amount),
        efa=read(TAG_EFA, parse_count),
        require_efa=read(TAG_REQUIRE_EFA, lambda text: text == "yes" or None) or False,
        idle_minutes=read(TAG_IDLE, parse_amount),
        unreadable=tuple(unreadable),
    )


def most_common(values: Iterable[T | None]) -> T | None:
    """Return the most common value that is known, so that one changed tag on one node does not decide."""
    found = Counter(value for value in values if value is not None)
    return found.most_common(1)[0][0] if found else None


def parse_cluster_id(text: str) -> str | None:
    """Return the text if it is a cluster id, else None."""
    return text if _ID.fullmatch(text) else None


def parse_count(text: str, most: int = 9999) -> int | None:
    """Return the number for one to four ASCII digits, up to `most`, else None."""
    return int(text) if _COUNT.fullmatch(text) and int(text) <= most else None


def parse_amount(text: str) -> float | None:
    """Return USD or minutes, above 0 and below 100,000, or None: no price and no time limit is 0."""
    return (float(text) or None) if _AMOUNT.fullmatch(text) else None


def iso(time: datetime) -> str:
    """Return a time in the form of the tags, in UTC: 2026-11-20T12:00:00Z."""
    return time.astimezone(UTC).strftime(_ISO)


def parse_time(text: str) -> datetime | None:
    """Return the time for a text in exactly that form, or None."""
    with contextlib.suppress(ValueError):  # 31 February
        if _TIME.fullmatch(text):
            found = datetime.strptime(text, _ISO).replace(tzinfo=UTC)
            return found if found.year in _YEARS else None
    return None


# The rules for extra tags of the user. EC2 allows every Unicode character in tags (Amazon EC2 User Guide,
# "Tag your Amazon EC2 resources"). Keys have up to 127 characters in the service model of EC2 and 128 in that
# guide, values 256; keys of AWS begin with `aws:` in any case, and a resource has at most 50 tags.

MOST = 35  # of the 50 of a resource; the others are for cloudddp's own tags


def extra_tag_problem(tags: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what is wrong with extra tags and what is allowed, or None."""
    for key, value in tags.items():
        folded = key.lower()
        if reserved := [prefix for prefix in ("aws:", "cloudddp:") if folded.startswith(prefix)]:
            return f"tag key {key!r} begins with '{reserved[0]}', which is reserved", "choose another key"
        limits = ((f"tag key {key[:60]!r}", key, 1, 127), (f"the value of tag {key!r}", value, 0, 256))
        for what, text, least, most in limits:
            if not least <= len(text) <= most or any(unicodedata.category(one) == "Cc" for one in text):
                allowed = f"allowed: {least} to {most} characters, without control characters"
                return f"{what} is not allowed", allowed
    return None
