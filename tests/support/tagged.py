"""Instances with the tags of a cluster of which this computer has no record and no key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

CLUSTER_ID = "c-0123456789"
TIME = "%Y-%m-%dT%H:%M:%SZ"


def tagged_instance(ec2: Any, cluster: str, owner: str = "user/moto", **tags: str) -> str:
    """Start a node of a cluster of one node and return its id. `tags` replaces tags of cloudddp, by the names
    that they have without the prefix."""
    now = datetime.now(UTC)
    own = {
        "cluster": cluster,
        "cluster-id": CLUSTER_ID,
        "owner": owner,
        "created": now.strftime(TIME),
        "expires": (now + timedelta(hours=2)).strftime(TIME),
        "nodes": "1",
        "gpus": "1",
        "usd-per-node-hour": "1.0274",
    }
    pairs = [{"Key": f"cloudddp:{key}", "Value": value} for key, value in {**own, **tags}.items()]
    launched = ec2.run_instances(
        ImageId=ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"],
        InstanceType="g5.xlarge",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": pairs}],
    )
    return str(launched["Instances"][0]["InstanceId"])
