"""The Elastic IPs of a cluster whose nodes have several interfaces: checked, allocated, associated.

EC2 allocates and associates one address per call, so these are the only calls whose number grows with the
nodes. They are made in parallel, a few at a time. Addresses are found by tag, so `down` releases them without
local state, and an address that was allocated twice, by a call that botocore has repeated, is released.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cloudddp.aws import elastic_ips, inventory
from cloudddp.aws.client import AWS
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.requests import Request, tag_specifications
from cloudddp.config import timing
from cloudddp.config.cluster_spec import Placement
from cloudddp.errors import AWSError, CloudDDPError, Message, ProgressCallback
from cloudddp.formats import plural

STEP = "address"
_PARALLEL = 8  # calls at a time: 256 nodes take 32 rounds, and EC2's request rate is not exceeded
_RETRY_SECONDS = 0.5

T = TypeVar("T")


def requests(count: int, tags: list[dict[str, str]], zone: str, region: str) -> tuple[Request, ...]:
    """Return the requests that allocate the addresses: those of a Local Zone (us-west-2-lax-1a) belong to its
    group (us-west-2-lax-1), and can be used nowhere else (EC2 API reference, AllocateAddress)."""
    group = {"NetworkBorderGroup": zone[:-1]} if zone[:-1] != region else {}
    params = {"Domain": "vpc", **group, "TagSpecifications": tag_specifications(tags, "elastic-ip")}
    return tuple(Request(f"{STEP}-{index}", "allocate_address", params) for index in range(count))


def check_limit(aws: AWS, spec: Placement, abandoned: Callable[[], str]) -> int:
    """Return how many Elastic IPs the nodes need. Raises CloudDDPError if the account may not have so many
    more.

    `abandoned` returns the id of a cluster of this name that `up` is going to remove, or '': its addresses do
    not count. Two AWS calls, if they suffice.
    """
    count, limit = spec.nodes, elastic_ips.limit(aws)
    used = len(elastic_ips.listed(aws, [])) if limit is not None else 0
    if limit is None or used + count <= limit:
        return count
    left = inventory.resources(aws, inventory.named(spec.name), ["Elastic IP"])
    removed = abandoned() if left else ""
    kept = sum(one.tags.cluster_id != removed for one in left)
    used -= len(left) - kept if removed else 0
    if used + count <= limit:
        return count
    hint: str = addresses_hint()
    if kept:
        hint = Message(
            f"{kept} of them are left of cluster {spec.name!r}: `cloudddp down` releases them; or {hint}"
        )
    raise CloudDDPError(
        f"{count} nodes with several network cards need {count} Elastic IPs; the account may have {limit} in "
        f"{aws.region} and has {used}",
        hint=hint,
    )


def addresses_hint() -> str:
    return (
        "ask for a higher quota `EC2-VPC Elastic IPs` in the Service Quotas console, connect to private "
        'addresses (connect = "private" or "jump"), or use a single network card: --no-efa'
    )


def associate(aws: AWS, cluster: Cluster, progress: ProgressCallback) -> bool:
    """Give every node that has no public address one of the cluster's Elastic IPs; return False if it has
    none. Safe to repeat. Raises CloudDDPError if there are too few."""
    deadline = time.monotonic() + timing.current().settle
    while known := elastic_ips.listed(aws, inventory.with_id(cluster.id)):
        served = {address.interface for address in known}
        waiting = [node for node in cluster.nodes.values() if node.interface not in served]
        free = [address for address in known if not address.interface]
        if len(free) >= len(waiting):
            break
        if time.monotonic() > deadline:  # a new address may not be listed by tag for a while
            raise CloudDDPError(
                f"{len(waiting)} nodes need an Elastic IP, and {len(free)} of the cluster are free"
            )
        time.sleep(_RETRY_SECONDS)
    else:
        return False
    if waiting:
        progress(f"associating {plural(len(waiting), 'Elastic IP')}")
    calls = [
        functools.partial(elastic_ips.associate, aws, address, node.interface)
        for address, node in zip(free, waiting, strict=False)
    ]
    in_parallel(calls + [functools.partial(elastic_ips.release, aws, one) for one in free[len(waiting) :]])
    return True


def in_parallel(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make every call, a few at a time; return the results in order, or raise the first error at the end."""
    if not calls:
        return []
    with ThreadPoolExecutor(min(_PARALLEL, len(calls)), "aws") as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.result() for future in futures]


def explained(error: AWSError) -> AWSError:
    """Return the error of an allocation, with what to do if it is the account's limit."""
    if error.code != elastic_ips.LIMIT:
        return error
    return AWSError(error.message, hint=addresses_hint(), code=error.code)
