"""The Deep Learning AMIs of the simulated account, and the SSM parameters that name them, in place of moto's
images of 2017.

Names, owner and sizes are as AWS publishes them; the ids are invented, and the same on every computer.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.simulator.ec2.patch import override, wrap

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
BY_ID = {image.image_id: image for image in IMAGES}

_PARAMETERS = "/aws/service/deeplearning"
_LOADING = threading.RLock()  # adding one looks whether all are there


def install() -> None:
    """Add the images and the parameters to every region; let own images have what their creation requests."""
    from moto.ec2.models import amis
    from moto.ec2.responses.amis import AmisResponse
    from moto.ssm.models import ParameterDict

    _add_images()
    override(ParameterDict, "_check_loading_status", _load_parameters)
    override(amis.Ami, "__init__", _with_root_volume)
    override(AmisResponse, "register_image", _register)


def _with_root_volume(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace moto's root device type `standard`, which EC2 does not have."""
    original(self, *args, **kwargs)
    if self.root_device_type == "standard":
        self.root_device_type = "ebs"


def _register(original: Callable[..., Any], self: Any) -> Any:
    """Keep the architecture, root device and size of RegisterImage; moto keeps name and description only."""
    answer = original(self)
    image = self.ec2_backend.amis[answer.result["ImageId"]]
    image.architecture = self._get_param("Architecture") or "i386"  # EC2's default for an EBS root volume
    image.root_device_name = self._get_param("RootDeviceName") or image.root_device_name
    for disk in self._get_param("BlockDeviceMappings", []):
        if disk.get("DeviceName") == image.root_device_name and disk.get("Ebs", {}).get("VolumeSize"):
            image.ebs_snapshot.volume.size = int(disk["Ebs"]["VolumeSize"])
    return answer


def _add_images() -> None:
    from moto.ec2.models import amis

    def load(self: Any) -> None:
        for image in IMAGES:
            self.amis[image.image_id] = ami = amis.Ami(
                self,
                image.image_id,
                name=image.name,
                description=image.description,
                owner_id=OWNER,
                owner_alias="amazon",
                public=True,
                virtualization_type="hvm",
                architecture=image.architecture,
                image_location=f"amazon/{image.name}",
                hypervisor="xen",
                root_device_type="ebs",
                root_device_name=image.root_device,
                creation_date=datetime(2026, 8, 22, 6, tzinfo=UTC),
            )
            ami.ebs_snapshot.volume.size = ROOT_GIB

    def mappings(original: Any) -> property:
        def disks(self: Any) -> Any:
            if self.id not in BY_ID:
                return original.fget(self)
            disk = {
                "SnapshotId": self.ebs_snapshot.id,
                "VolumeSize": ROOT_GIB,
                "VolumeType": "gp3",
                "Encrypted": False,
                "DeleteOnTermination": True,
            }
            return [{"DeviceName": self.root_device_name, "Ebs": disk}]

        return property(disks)

    wrap(amis.AmiBackend, "_load_amis", lambda _original: load)
    wrap(amis.Ami, "block_device_mappings", mappings)


def _load_parameters(original: Callable[..., None], self: Any, key: str) -> None:
    """Add the parameters that name the images, when one of theirs is read. A request that comes meanwhile
    waits for all of them."""
    original(self, key)
    prefix = str(key or "")
    if prefix.startswith(_PARAMETERS) or _PARAMETERS.startswith(prefix or "?"):
        with _LOADING:
            if not getattr(self, "_deep_learning", False):
                self._deep_learning = True
                _add_parameters(self)


def _add_parameters(parameters: Any) -> None:
    from moto.core.utils import utcnow
    from moto.ssm import models

    parameter: Any = models.Parameter
    for image in IMAGES:
        parameters[image.parameter].append(
            parameter(
                account_id=parameters.account_id,
                name=image.parameter,
                value=image.image_id,
                parameter_type="String",
                description=image.name,
                allowed_pattern=None,
                keyid=None,
                last_modified_date=utcnow(),
                version=1,
                data_type="text",
            )
        )
