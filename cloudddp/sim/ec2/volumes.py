"""The volumes of a launch: size of the root volume, DeleteOnTermination, IOPS and throughput."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2.ami_catalog import ROOT_GIB
from cloudddp.sim.ec2.current_request import parameters
from cloudddp.sim.ec2.images import BY_ID
from cloudddp.sim.ec2.patch import client_error, wrap

_GP3_THROUGHPUT = 125  # MiB/s, AWS's default


def install() -> None:
    """Replace moto's creation of an instance's volumes."""
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses.instances import InstanceResponse

    wrap(Instance, "setup_defaults", lambda _original: _create_root)
    wrap(Instance, "add_block_device", lambda _original: _create_and_attach)
    wrap(InstanceResponse, "_parse_block_device_mapping", _parse_mappings)


def check(backend: Any, image_id: str, mappings: list[dict[str, Any]]) -> None:
    """Fail the request if the root volume is smaller than the image."""
    image = BY_ID.get(image_id)
    for mapping in mappings:
        size = mapping["Ebs"].get("VolumeSize")
        if image and mapping["DeviceName"] == image.root_device and size and int(size) < ROOT_GIB:
            snapshot = backend.amis[image_id].ebs_snapshot.id
            client_error(
                "InvalidBlockDeviceMapping",
                f"Volume of size {size}GB is smaller than snapshot '{snapshot}', expect size >= {ROOT_GIB}GB",
            )


def _create_root(instance: Any) -> None:
    image = BY_ID.get(instance.image_id)
    volume = instance.ec2_backend.create_volume(
        size=ROOT_GIB if image else 8, zone_name=instance._placement.zone
    )
    instance.ec2_backend.attach_volume(volume.id, instance.id, instance.root_device_name, True)


def _create_and_attach(
    instance: Any,
    size: int,
    device_path: str,
    snapshot_id: str | None,
    encrypted: bool,
    delete_on_termination: bool,
    kms_key_id: str | None,
    volume_type: str | None,
) -> None:
    """As moto does, with the requested IOPS and throughput."""
    mappings = parameters().get("BlockDeviceMappings") or []
    requested = {mapping["DeviceName"]: mapping.get("Ebs", {}) for mapping in mappings}.get(device_path, {})
    volume = instance.ec2_backend.create_volume(
        size=size,
        zone_name=instance._placement.zone,
        snapshot_id=snapshot_id,
        encrypted=encrypted,
        kms_key_id=kms_key_id,
        volume_type=volume_type,
        iops=requested.get("Iops"),
        throughput=requested.get("Throughput") or (_GP3_THROUGHPUT if volume_type == "gp3" else None),
    )
    instance.ec2_backend.attach_volume(volume.id, instance.id, device_path, delete_on_termination)


def _parse_mappings(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse(self: Any) -> Any:
        get = self._get_param
        # Without instance store: EC2 accepts such a mapping, and ignores it for a type that has none.
        ebs = [one for one in get("BlockDeviceMappings", []) if "Ebs" in one or not one.get("VirtualName")]
        self._get_param = lambda name, *more: ebs if name == "BlockDeviceMappings" else get(name, *more)
        try:
            mappings = original(self)
        finally:
            del self._get_param
        image = BY_ID.get(get("ImageId"))
        for mapping, requested in zip(mappings, ebs, strict=True):
            if image and mapping["DeviceName"] == image.root_device:
                delete = requested.get("Ebs", {}).get("DeleteOnTermination", True)
                mapping["Ebs"]["DeleteOnTermination"] = delete
                mapping["Ebs"]["VolumeSize"] = mapping["Ebs"]["VolumeSize"] or ROOT_GIB
        return mappings

    return parse
