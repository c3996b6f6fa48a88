"""Adds the images of ami_catalog.py, and the SSM parameters that name them, in place of moto's images of
2017."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cloudddp.sim.ec2.ami_catalog import IMAGES, OWNER, ROOT_GIB
from cloudddp.sim.ec2.patch import override, wrap

BY_ID = {image.image_id: image for image in IMAGES}

_PARAMETERS = "/aws/service/deeplearning"


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
    """Add the parameters that name the images, when one of theirs is read."""
    from moto.core.utils import utcnow
    from moto.ssm import models

    original(self, key)
    prefix = str(key or "")
    loaded = getattr(self, "_deep_learning", False)
    if loaded or not (prefix.startswith(_PARAMETERS) or _PARAMETERS.startswith(prefix or "?")):
        return
    self._deep_learning = True
    parameter: Any = models.Parameter
    for image in IMAGES:
        self[image.parameter].append(
            parameter(
                account_id=self.account_id,
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
