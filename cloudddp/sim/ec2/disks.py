"""The volumes of a launch: the root as large as the image, kept or deleted as asked, as fast as asked.

Knows a launch's block device mappings and moto's volumes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2.images import BY_ID
from cloudddp.sim.ec2.patch import refuse, wrap
from cloudddp.sim.ec2.request import asked
from cloudddp.sim.images import ROOT_GIB

_GP3_THROUGHPUT = 125  # MiB/s, AWS's default


def install() -> None:
    """Replace moto's way of making an instance's volumes."""
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses.instances import InstanceResponse

    wrap(Instance, "setup_defaults", lambda _original: _root)
    wrap(Instance, "add_block_device", lambda _original: _attach)
    wrap(InstanceResponse, "_parse_block_device_mapping", _parse)


def check(backend: Any, image_id: str, mappings: list[dict[str, Any]]) -> None:
    """Refuse a root volume smaller than the image."""
    image = BY_ID.get(image_id)
    for mapping in mappings:
        size = mapping["Ebs"].get("VolumeSize")
        if image and mapping["DeviceName"] == image.root_device and size and int(size) < ROOT_GIB:
            snapshot = backend.amis[image_id].ebs_snapshot.id
            refuse(
                "InvalidBlockDeviceMapping",
                f"Volume of size {size}GB is smaller than snapshot '{snapshot}', expect size >= {ROOT_GIB}GB",
            )


def _root(instance: Any) -> None:
    image = BY_ID.get(instance.image_id)
    volume = instance.ec2_backend.create_volume(
        size=ROOT_GIB if image else 8, zone_name=instance._placement.zone
    )
    instance.ec2_backend.attach_volume(volume.id, instance.id, instance.root_device_name, True)


def _attach(
    instance: Any,
    size: int,
    device_path: str,
    snapshot_id: str | None,
    encrypted: bool,
    delete_on_termination: bool,
    kms_key_id: str | None,
    volume_type: str | None,
) -> None:
    """As moto's, with the speed that the request asked for."""
    wishes = {m["DeviceName"]: m.get("Ebs", {}) for m in asked().get("BlockDeviceMappings") or []}
    wish = wishes.get(device_path, {})
    volume = instance.ec2_backend.create_volume(
        size=size,
        zone_name=instance._placement.zone,
        snapshot_id=snapshot_id,
        encrypted=encrypted,
        kms_key_id=kms_key_id,
        volume_type=volume_type,
        iops=wish.get("Iops"),
        throughput=wish.get("Throughput") or (_GP3_THROUGHPUT if volume_type == "gp3" else None),
    )
    instance.ec2_backend.attach_volume(volume.id, instance.id, device_path, delete_on_termination)


def _parse(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse(self: Any) -> Any:
        ask = self._get_param
        # Instance store: EC2 takes the mapping, also for a type that has none and then ignores it.
        asked = [one for one in ask("BlockDeviceMappings", []) if "Ebs" in one or not one.get("VirtualName")]
        self._get_param = lambda name, *more: asked if name == "BlockDeviceMappings" else ask(name, *more)
        try:
            mappings = original(self)
        finally:
            del self._get_param
        image = BY_ID.get(ask("ImageId"))
        for mapping, wish in zip(mappings, asked, strict=True):
            if image and mapping["DeviceName"] == image.root_device:
                mapping["Ebs"]["DeleteOnTermination"] = wish.get("Ebs", {}).get("DeleteOnTermination", True)
                mapping["Ebs"]["VolumeSize"] = mapping["Ebs"]["VolumeSize"] or ROOT_GIB
        return mappings

    return parse
