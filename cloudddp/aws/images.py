"""Machine images: which one a cluster's nodes boot. Read-only."""

from __future__ import annotations

from dataclasses import dataclass

from cloudddp.aws.client import AWS
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import UsageError


@dataclass(frozen=True, slots=True)
class Image:
    """A machine image: its id, the device of its root volume, and the smallest size of that volume."""

    id: str
    root_device: str
    disk_gb: int


def find(aws: AWS, spec: ClusterSpec, arch: str) -> Image:
    """Return the image of `spec.image` (an id or an SSM parameter). Raises UsageError if the type cannot run it."""
    image_id = spec.image
    if image_id.startswith("/"):
        name = image_id.replace("{arch}", arch)
        image_id = aws.call("ssm", "get_parameter", Name=name)["Parameter"]["Value"]
    found = aws.call("ec2", "describe_images", ImageIds=[image_id])["Images"]
    if not found:
        raise UsageError(
            f"image {image_id} does not exist in {aws.region}", hint="see `image` in cloudddp.toml"
        )
    data = found[0]
    if data.get("Architecture", arch) != arch:
        raise UsageError(f"image {image_id} is for {data['Architecture']}, {spec.instance_type} is {arch}")
    root = data.get("RootDeviceName") or "/dev/sda1"
    disks = [
        m.get("Ebs", {}).get("VolumeSize", 0)
        for m in data.get("BlockDeviceMappings", [])
        if m.get("DeviceName") == root
    ]
    return Image(image_id, root, max([int(d or 0) for d in disks], default=0))
