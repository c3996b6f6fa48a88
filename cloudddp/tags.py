"""The tags of a cluster's objects: their names, and what AWS shows of them decoded into typed, bounded values. Pure.

Whoever may call ec2:CreateTags writes these texts, so a value that is not of the form that `up` writes counts as
none, and is named in `unreadable`. Text for people is safe to show. Only a cluster id that is one may become part of
a local path (state.ClusterFolder); `cluster_id` is '' where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.text import one_line

TAG_CLUSTER = "cloudddp:cluster"
TAG_ID = "cloudddp:cluster-id"
TAG_OWNER = "cloudddp:owner"
TAG_CREATED = "cloudddp:created"
TAG_EXPIRES = "cloudddp:expires"
TAG_VERSION = "cloudddp:version"
TAG_NODE_RANK = "cloudddp:node-rank"
TAG_NODES = "cloudddp:nodes"  # how many there are to be
TAG_PRICE = "cloudddp:usd-per-node-hour"  # with its disk and address

# [0-9], not \d: that takes every script's digits, and str.isdigit() takes '²', which int() refuses.
_ID = re.compile(r"c-[0-9a-f]{10}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_COUNT = re.compile(r"[0-9]{1,4}")
_PRICE = re.compile(r"[0-9]{1,5}(\.[0-9]{1,6})?")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_ISO = "%Y-%m-%dT%H:%M:%SZ"
_YEARS = range(2020, 2200)  # a sum made from the year 1 would read as a bill
_SHOWN = 60  # characters of a value in a warning; EC2 allows 256


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one object. `cluster` and `owner` are safe to show, whatever was written."""

    cluster: str = ""
    cluster_id: str = ""  # c- and ten hexadecimal digits, or ''
    owner: str = ""
    created: datetime | None = None
    expires: datetime | None = None
    node_rank: int | None = None
    nodes: int | None = None  # how many the cluster was made with; at least 1
    price: float | None = None  # USD a node and hour; finite, above 0
    # Such as "tag cloudddp:node-rank = '²' ...", for a warning that names the object.
    unreadable: tuple[str, ...] = ()


def decode(pairs: Iterable[Mapping[str, Any]]) -> Tags:
    """Return the tags in a list of {"Key": ..., "Value": ...} as AWS answers it. Never raises, whatever they contain.

    Keys are exact, as on EC2: `Cloudddp:Cluster` is another tag.
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
    if name and not is_name(name):
        unreadable.append(f"tag {TAG_CLUSTER} = '{one_line(name, _SHOWN)}' is not a cluster's name")
    if TAG_CLUSTER in texts and TAG_ID not in texts:
        unreadable.append(f"tag {TAG_ID} is missing")
    return Tags(
        cluster=one_line(name),
        cluster_id=read(TAG_ID, cluster_id) or "",
        owner=one_line(texts.get(TAG_OWNER, "")),
        created=read(TAG_CREATED, moment),
        expires=read(TAG_EXPIRES, moment),
        node_rank=read(TAG_NODE_RANK, count),
        nodes=read(TAG_NODES, lambda text: count(text) or None),
        price=read(TAG_PRICE, price),
        unreadable=tuple(unreadable),
    )


def cluster_id(text: str) -> str | None:
    """Return the text where it is a cluster's id, else None."""
    return text if _ID.fullmatch(text) else None


def is_name(text: str) -> bool:
    """Return whether a cluster can have that name."""
    return _NAME.fullmatch(text) is not None


def count(text: str) -> int | None:
    """Return the number that a text of one to four ASCII digits names, else None."""
    return int(text) if _COUNT.fullmatch(text) else None


def price(text: str) -> float | None:
    """Return USD, above 0 and below 100,000, or None: 0 is not a price of EC2 but a mistake."""
    return (float(text) or None) if _PRICE.fullmatch(text) else None


def iso(moment: datetime) -> str:
    """Return a UTC moment as in the tags: 2026-11-20T12:00:00Z."""
    return moment.astimezone(UTC).strftime(_ISO)


def moment(text: str) -> datetime | None:
    """Return the moment that a text of exactly that form names, or None."""
    if not _TIME.fullmatch(text):
        return None
    try:
        found = datetime.strptime(text, _ISO).replace(tzinfo=UTC)
    except ValueError:  # the 31st of February
        return None
    return found if found.year in _YEARS else None
