"""Ray's cluster launcher with the lab: it has its own code for keys, groups, SSH and teardown.

Only the configuration file is ours. Ray is not installed on the node: its setting for start commands is
replaced by commands that leave a file.
"""

from __future__ import annotations

import json

from support.witnesslab import IMAGE_PARAMETER, Lab, witness

from cloudddp.simulator import control


def configuration(image: str) -> str:
    """A cluster of one head node. JSON is YAML. With a profile given, Ray creates no roles."""
    head = {"InstanceType": "m5.large", "ImageId": image, "IamInstanceProfile": {"Name": "witness"}}
    return json.dumps(
        {
            "cluster_name": "witness",
            "max_workers": 0,
            "provider": {"type": "aws", "region": "us-east-1", "cache_stopped_nodes": False},
            "auth": {"ssh_user": "ubuntu"},
            "available_node_types": {"head": {"node_config": head, "resources": {}, "max_workers": 0}},
            "head_node_type": "head",
            "file_mounts": {"/home/ubuntu/copied": "copied"},
            "setup_commands": ["cp copied set-up"],
            "head_setup_commands": [],  # by default `pip install boto3`, and the lab has no internet access
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
    (lab.folder / "copied").write_text("from the laptop\n")

    lab(*quiet, ray, "up", "-y", "cluster.yaml")
    (node,) = control.nodes(lab.sim)
    assert node["state"] == "running"

    output = lab(*quiet, ray, "exec", "cluster.yaml", "cat started set-up").stdout.splitlines()
    assert f"ip-{node['private_ip'].replace('.', '-')}" in output
    assert "from the laptop" in output

    lab(*quiet, ray, "down", "-y", "cluster.yaml")
    assert lab.states() == []
