"""Ray's cluster launcher against the lab: a launcher with its own ideas of keys, groups, SSH and teardown.

Only its configuration file is ours. Ray is not installed on the node: the commands that would start it are Ray's
own settings, and here they leave a mark instead.
"""

from __future__ import annotations

import json

import pytest
from support.witnesslab import IMAGE_PARAMETER, Lab, witness

from cloudddp.sim import control

pytestmark = pytest.mark.timeout(300)


def configuration(image: str) -> str:
    """A cluster of one head node. JSON is YAML. With a profile named, Ray makes no roles of its own."""
    head = {"InstanceType": "m5.large", "ImageId": image, "IamInstanceProfile": {"Name": "witness"}}
    return json.dumps(
        {
            "cluster_name": "witness",
            "max_workers": 0,
            "provider": {"type": "aws", "region": "us-east-1", "cache_stopped_nodes": False},
            "auth": {"ssh_user": "ubuntu"},
            "available_node_types": {"head": {"node_config": head, "resources": {}, "max_workers": 0}},
            "head_node_type": "head",
            "file_mounts": {"/home/ubuntu/carried": "carried"},
            "setup_commands": ["cp carried set-up"],
            "head_setup_commands": [],  # by default `pip install boto3`, and the lab has no way out
            "head_start_ray_commands": ["hostname > started"],
        }
    )


def test_ray_up_exec_and_down(lab: Lab) -> None:
    ray, aws = witness("ray", "ray"), witness("aws", "aws")
    quiet = ("env", "RAY_USAGE_STATS_ENABLED=0")
    image = lab(
        aws,
        "ssm",
        "get-parameter",
        "--name",
        IMAGE_PARAMETER,
        "--query",
        "Parameter.Value",
        "--output",
        "text",
    )
    lab(aws, "iam", "create-instance-profile", "--instance-profile-name", "witness")
    (lab.folder / "cluster.yaml").write_text(configuration(image.stdout.strip()))
    (lab.folder / "carried").write_text("from the laptop\n")

    lab(*quiet, ray, "up", "-y", "cluster.yaml")
    (node,) = control.nodes(lab.sim)
    assert node["state"] == "running"

    said = lab(*quiet, ray, "exec", "cluster.yaml", "cat started set-up").stdout.splitlines()
    assert f"ip-{node['private_ip'].replace('.', '-')}" in said
    assert "from the laptop" in said

    lab(*quiet, ray, "down", "-y", "cluster.yaml")
    assert lab.states() == []
