"""The volumes of a launch: size of the root volume, DeleteOnTermination, IOPS and throughput."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudddp.simulator.ec2 import encryption
from cloudddp.simulator.ec2.images import BY_ID, ROOT_GIB
from cloudddp.simulator.ec2.patch import (
    client_error,
    invalid_combination,
    invalid_value,
    override,
    parameters,
    wrap,
)

_GP3_THROUGHPUT = 125  # MiB/s, AWS's default
_GP3_MAX_THROUGHPUT = 2000
_GP3_IOPS = 3000


def install() -> None:
    """Replace moto's creation of an instance's volumes."""
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses.instances import InstanceResponse

    wrap(Instance, "setup_defaults", lambda _original: _create_root)
    wrap(Instance, "add_block_device", lambda _original: _create_and_attach)
    override(InstanceResponse, "_parse_block_device_mapping", _parse_mappings)


def check(backend: Any, image_id: str, mappings: list[dict[str, Any]]) -> None:
    """Fail the request if the root volume is smaller than the image, or its performance is not available."""
    image = BY_ID.get(image_id)
    for requested in parameters().get("BlockDeviceMappings") or []:
        _check_throughput(requested.get("Ebs", {}))
    for mapping in mappings:
        size = mapping["Ebs"].get("VolumeSize")
        if image and mapping["DeviceName"] == image.root_device and size and int(size) < ROOT_GIB:
            snapshot = backend.amis[image_id].ebs_snapshot.id
            client_error(
                "InvalidBlockDeviceMapping",
                f"Volume of size {size}GB is smaller than snapshot '{snapshot}', expect size >= {ROOT_GIB}GB",
            )


def _check_throughput(ebs: dict[str, Any]) -> None:
    """The range is that of EC2's model, the ratio and its message are those of runs-on/runs-on, issue 260."""
    throughput, iops = int(ebs.get("Throughput") or 0), int(ebs.get("Iops") or _GP3_IOPS)
    if not throughput:
        return
    if ebs.get("VolumeType") != "gp3":
        invalid_combination(f"The parameter throughput is not supported for {ebs.get('VolumeType')} volumes.")
    if not _GP3_THROUGHPUT <= throughput <= _GP3_MAX_THROUGHPUT:
        bound = (
            f"minimum is {_GP3_THROUGHPUT}"
            if throughput < _GP3_THROUGHPUT
            else f"maximum is {_GP3_MAX_THROUGHPUT}"
        )
        invalid_value(f"Volume throughput of {throughput} is not valid; {bound}.")
    if throughput / iops > 0.25:
        invalid_value(
            f"Throughput (MiBps) to iops ratio of {throughput / iops:.6f} is too high; maximum is 0.250000 "
            "MiBps per iops"
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
        kms_key_id=encryption.key_arn(instance.ec2_backend, kms_key_id),
        volume_type=volume_type,
        iops=requested.get("Iops"),
        throughput=requested.get("Throughput") or (_GP3_THROUGHPUT if volume_type == "gp3" else None),
    )
    volume.volume_initialization_rate = requested.get("VolumeInitializationRate")
    instance.ec2_backend.attach_volume(volume.id, instance.id, device_path, delete_on_termination)


def _parse_mappings(original: Callable[..., Any], self: Any) -> Any:
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
