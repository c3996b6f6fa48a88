"""The Deep Learning AMIs of the simulated account, and the SSM parameters that name them.

Pure data: names, owner and sizes as AWS publishes them; the ids are invented, and the same on every computer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

OWNER = "898082745236"
ROOT_GIB = 75  # size of the root snapshot; AWS refuses a smaller root volume
BUILD = "20260822"

# As the release notes of PyTorch 2.12 list them; AWS's images say so in their descriptions.
_FAMILIES = {
    "x86_64": "G4dn, G5, G6, Gr6, G6e, P4d, P4de, P5, P5e, P5en, P6-B200",
    "arm64": "G5g",
}
_NOTES = "https://docs.aws.amazon.com/dlami/latest/devguide/appendix-ami-release-notes.html"
_UBUNTU, _AMAZON = "/dev/sda1", "/dev/xvda"
_TYPES = {
    "base-oss-nvidia-driver-gpu-ubuntu-22.04": ("Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04)", _UBUNTU),
    "base-oss-nvidia-driver-gpu-ubuntu-24.04": ("Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)", _UBUNTU),
    "base-oss-nvidia-driver-gpu-amazon-linux-2023": (
        "Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023)",
        _AMAZON,
    ),
    "base-with-single-cuda-amazon-linux-2023": ("Base AMI with Single CUDA (Amazon Linux 2023)", _AMAZON),
} | {
    f"oss-nvidia-driver-gpu-pytorch-{torch}-ubuntu-{ubuntu}": (
        f"OSS Nvidia Driver AMI GPU PyTorch {torch} (Ubuntu {ubuntu})",
        _UBUNTU,
    )
    for torch, ubuntu in (
        ("2.7", "22.04"),
        ("2.10", "24.04"),
        ("2.12", "24.04"),
        ("2.13", "26.04"),
        ("2.14", "26.04"),
    )
}


@dataclass(frozen=True, slots=True)
class Image:
    """One image; `parameter` is the SSM parameter whose value is `image_id`."""

    image_id: str
    name: str
    architecture: str
    root_device: str
    parameter: str
    description: str


def _image(kind: str, architecture: str) -> Image:
    title, root_device = _TYPES[kind]
    arm = "ARM64 " if architecture == "arm64" else ""
    digest = hashlib.sha256(f"{architecture}/{kind}".encode()).hexdigest()
    return Image(
        image_id=f"ami-{digest[:17]}",
        name=f"Deep Learning {arm}{title} {BUILD}",
        architecture=architecture,
        root_device=root_device,
        description=f"Supported EC2 instances: {_FAMILIES[architecture]}. Release notes: {_NOTES}",
        parameter=f"/aws/service/deeplearning/ami/{architecture}/{kind}/latest/ami-id",
    )


IMAGES = tuple(_image(kind, architecture) for kind in _TYPES for architecture in ("x86_64", "arm64"))
