"""What makes moto's EC2 good enough to rehearse on: images, parameters, and the rules that moto leaves out.

Used by the server and, in process, by `rehearse`. It changes moto once per process and starts nothing: nodes,
addresses that answer and states that take time belong to lifecycle.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from cloudddp.sim.control import HIDDEN
from cloudddp.sim.images import IMAGES, OWNER, ROOT_GIB

LOCK = threading.RLock()
"""Held by everything that changes instances: moto itself is served by many threads and locks nothing."""

_PARAMETERS = "/aws/service/deeplearning"
_IMAGES = {image.image_id: image for image in IMAGES}
_prepared = False


def prepare() -> None:
    """Teach moto what AWS does and it does not; once per process, before any backend exists."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    _validate()
    _offer_images()
    _offer_parameters()
    _refine_launch()
    _refine_termination()
    _protect_groups()


@contextlib.contextmanager
def rehearse() -> Iterator[None]:
    """AWS in this process: every boto3 call inside is answered by moto, instances run at once.

    Nothing is started, no credentials are needed, and the environment is as before on exit. The region is
    AWS_REGION's, or AWS_DEFAULT_REGION's, or us-east-1.
    """
    import moto

    prepare()
    before = dict(os.environ)
    region = before.get("AWS_REGION") or before.get("AWS_DEFAULT_REGION") or "us-east-1"
    for name in (*HIDDEN, "AWS_ENDPOINT_URL"):
        os.environ.pop(name, None)
    os.environ.update(
        AWS_ACCESS_KEY_ID="rehearsal",
        AWS_SECRET_ACCESS_KEY="rehearsal",  # noqa: S106 (no secret: it says what it is)
        AWS_REGION=region,
        AWS_DEFAULT_REGION=region,
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    try:
        with moto.mock_aws():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def gpus(instance_type: str) -> list[str]:
    """The model of each GPU of an instance type, as DescribeInstanceTypes says; empty where it has none."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    listed = INSTANCE_TYPES.get(instance_type, {}).get("GpuInfo", {}).get("Gpus", [])
    return [f"{gpu['Manufacturer']} {gpu['Name']}" for gpu in listed for _ in range(gpu.get("Count", 0))]


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace an attribute of moto's by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def _validate() -> None:
    from moto import settings

    for name in ("ENABLE_AMI_VALIDATION", "EC2_ENABLE_INSTANCE_TYPE_VALIDATION", "ENABLE_KEYPAIR_VALIDATION"):
        if not hasattr(settings, name):
            raise RuntimeError(f"this moto has no setting {name}; the simulator was written for moto 5.2")
        setattr(settings, name, True)


def _offer_images() -> None:
    from moto.ec2.models import amis

    def load(self: Any) -> None:
        for image in IMAGES:
            self.amis[image.image_id] = ami = amis.Ami(
                self,
                image.image_id,
                name=image.name,
                description=f"{image.name} (simulated)",
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
            if self.id not in _IMAGES:
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


def _offer_parameters() -> None:
    from moto.core.utils import utcnow
    from moto.ssm import models

    parameter: Any = models.Parameter

    def check(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def load(self: Any, key: str) -> None:
            original(self, key)
            asked = str(key or "")
            loaded = getattr(self, "_deep_learning", False)
            if loaded or not (asked.startswith(_PARAMETERS) or _PARAMETERS.startswith(asked or "?")):
                return
            self._deep_learning = True
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

        return load

    wrap(models.ParameterDict, "_check_loading_status", check)


def _refine_launch() -> None:
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses.instances import InstanceResponse

    def run_instances(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(self: Any, image_id: str, count: int, *args: Any, **kwargs: Any) -> Any:
            with LOCK:
                _check_groups(self, kwargs)
                _check_root(self, image_id, kwargs)
                _place(self, kwargs)
                tags = kwargs.get("tags", {}).get("network-interface", {})
                known = set(self.reservations)
                try:
                    reservation = original(self, image_id, count, *args, **kwargs)
                except BaseException:
                    _undo(self, known)
                    raise
                for instance in reservation.instances:
                    for interface in _interfaces(instance):
                        interface.add_tags(tags)
                return reservation

        return run

    def prep_nics(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def prepare_interfaces(self: Any, nic_spec: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
            kept = {int(n["DeviceIndex"]) for n in nic_spec if _outlives(n)}
            original(self, nic_spec, *args, **kwargs)
            # Not self.nics: it holds one interface per device index, and several cards may use the same index.
            for interface in _interfaces(self):
                interface.delete_on_termination = interface.device_index not in kept
            if not self.security_groups and 0 in self.nics:
                self.security_groups = list(self.nics[0]._group_set)

        return prepare_interfaces

    def parse_mapping(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def parse(self: Any) -> Any:
            mappings = original(self)
            asked = self._get_param("BlockDeviceMappings", [])
            image = _IMAGES.get(self._get_param("ImageId"))
            for mapping, wish in zip(mappings, asked, strict=True):
                if image and mapping["DeviceName"] == image.root_device:
                    mapping["Ebs"]["DeleteOnTermination"] = wish.get("Ebs", {}).get(
                        "DeleteOnTermination", True
                    )
                    mapping["Ebs"]["VolumeSize"] = mapping["Ebs"]["VolumeSize"] or ROOT_GIB
            return mappings

        return parse

    def defaults(self: Any) -> None:
        image = _IMAGES.get(self.image_id)
        volume = self.ec2_backend.create_volume(size=ROOT_GIB if image else 8, zone_name=self._placement.zone)
        self.ec2_backend.attach_volume(volume.id, self.id, self.root_device_name, True)

    wrap(EC2Backend, "run_instances", run_instances)
    wrap(Instance, "prep_nics", prep_nics)
    wrap(Instance, "setup_defaults", lambda _original: defaults)
    wrap(InstanceResponse, "_parse_block_device_mapping", parse_mapping)


def _interfaces(instance: Any) -> list[Any]:
    return [eni for eni in list(instance.ec2_backend.enis.values()) if eni.instance is instance]


def _outlives(nic: dict[str, Any]) -> bool:
    """On AWS an interface made by RunInstances dies with the instance unless the request says otherwise."""
    return bool(nic.get("NetworkInterfaceId")) or nic.get("DeleteOnTermination") is False


def _check_groups(backend: Any, kwargs: dict[str, Any]) -> None:
    """Moto invents the unknown security groups of a network interface."""
    from moto.ec2.exceptions import InvalidSecurityGroupNotFoundError

    for nic in kwargs.get("nics") or []:
        for group in nic.get("Groups") or []:
            if backend.get_security_group_from_id(group) is None:
                raise InvalidSecurityGroupNotFoundError(group)


def _check_root(backend: Any, image_id: str, kwargs: dict[str, Any]) -> None:
    from moto.ec2.exceptions import EC2ClientError

    image = _IMAGES.get(image_id)
    for mapping in kwargs.get("block_device_mappings") or []:
        size = mapping["Ebs"].get("VolumeSize")
        if image and mapping["DeviceName"] == image.root_device and size and int(size) < ROOT_GIB:
            snapshot = backend.amis[image_id].ebs_snapshot.id
            raise EC2ClientError(
                "InvalidBlockDeviceMapping",
                f"Volume of size {size}GB is smaller than snapshot '{snapshot}', expect size >= {ROOT_GIB}GB",
            )


def _place(backend: Any, kwargs: dict[str, Any]) -> None:
    """Without a subnet, moto takes an address out of the air and AWS the zone's default subnet."""
    nics = kwargs.get("nics") or []
    if kwargs.get("subnet_id") or any(nic.get("SubnetId") or nic.get("NetworkInterfaceId") for nic in nics):
        return
    defaults = backend.get_default_subnets()
    if not defaults:
        return
    subnet = defaults.get(kwargs.get("placement")) or defaults[min(defaults)]
    kwargs["subnet_id"] = subnet.id


def _undo(backend: Any, known: set[str]) -> None:
    """A launch that fails half way must not leave the half: on AWS it leaves nothing."""
    for name in [name for name in backend.reservations if name not in known]:
        for instance in backend.reservations[name].instances:
            instance.terminate()
        del backend.reservations[name]


def _refine_termination() -> None:
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.instances import Instance

    def terminate(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(self: Any) -> Any:
            with LOCK:
                if self.state == "terminated":
                    return self._state
                previous = original(self)
                _release_interfaces(self)
                return previous

        return end

    def terminate_instances(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(self: Any, instance_ids: list[str]) -> Any:
            with LOCK:
                return original(self, list(dict.fromkeys(instance_ids)))

        return end

    wrap(Instance, "terminate", terminate)
    wrap(EC2Backend, "terminate_instances", terminate_instances)


def _release_interfaces(instance: Any) -> None:
    """Moto leaves interfaces attached to the dead, and forgets those that share a device index."""
    for interface in _interfaces(instance):
        if interface.delete_on_termination:
            interface.delete()
        interface.instance = interface.attachment_id = interface.attach_time = None
        interface.status = "available"


def _protect_groups() -> None:
    from moto.ec2.exceptions import DependencyViolationError
    from moto.ec2.models import EC2Backend

    def delete_security_group(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def delete(self: Any, name: str | None = None, group_id: str | None = None) -> Any:
            with LOCK:
                group = self.get_security_group_from_id(group_id) if group_id else None
                if name and not group_id:
                    group = self.get_security_group_from_name(name)
                if group and _in_use(self, group):
                    raise DependencyViolationError(f"resource {group.id} has a dependent object")
                return original(self, name=name, group_id=group_id)

        return delete

    wrap(EC2Backend, "delete_security_group", delete_security_group)


def _in_use(backend: Any, group: Any) -> bool:
    held = (i.security_groups for i in backend.all_instances() if i.state != "terminated")
    held_by_interfaces = (eni._group_set for eni in list(backend.enis.values()))
    if any(group in groups for groups in itertools.chain(held, held_by_interfaces)):
        return True
    others = (g for groups in backend.groups.values() for g in groups.values() if g is not group)
    return any(
        rule.source_group.get("GroupId") == group.id
        for other in others
        for rule in (*other.ingress_rules, *other.egress_rules)
    )
