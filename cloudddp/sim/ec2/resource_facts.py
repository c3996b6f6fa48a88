"""What conditions of policies can refer to: the tags of moto's EC2 resources, and a few of their
attributes."""

from __future__ import annotations

from typing import Any

from cloudddp.sim.iam.request import Resource


class MotoResources:
    """The resources of one account and region. A name that does not exist is a resource without tags."""

    def __init__(self, account: str, region: str) -> None:
        from moto.backends import get_backend

        self._backend: Any = get_backend("ec2")[account][region]
        self._arn = f"arn:aws:ec2:{region}:{account}:"

    def find(self, kind: str, name: str) -> Resource:
        match kind:
            case "key-pair":
                return self._key_pair(name)
            case "placement-group":
                return self._placement_group(name)
            case "security-group":
                group = self._backend.get_security_group_by_name_or_id(name)
                return self._resource(group.id if group else name, self._vpc(group))
            case "subnet":
                subnet = _first(self._backend.subnets, name)
                zone = {"ec2:AvailabilityZone": subnet.availability_zone} if subnet else {}
                return self._resource(name, {**zone, **self._vpc(subnet)})
            case "elastic-ip":
                return self._resource(self._allocation(name))
            case "image":
                return self._image(name)
            case "snapshot":
                return self._resource(name, public=True)
        return self._resource(name)

    def _resource(self, name: str, keys: dict[str, str] | None = None, *, public: bool = False) -> Resource:
        return Resource(name, dict(self._backend.tags.get(name) or {}), keys or {}, public)

    def _vpc(self, item: Any) -> dict[str, str]:
        return {"ec2:Vpc": f"{self._arn}vpc/{item.vpc_id}"} if item is not None and item.vpc_id else {}

    def _key_pair(self, name: str) -> Resource:
        for key in list(self._backend.key_pairs.values()):
            if name in (key.key_name, key.id):
                return Resource(key.key_name, dict(self._backend.tags.get(key.id) or {}))
        return Resource(name)

    def _placement_group(self, name: str) -> Resource:
        groups = getattr(self._backend, "__dict__", {}).get("_cloudddp_placement_groups", {})
        for group in list(groups.values()):
            if name in (group.group_name, group.group_id):
                keys = {"ec2:PlacementGroupStrategy": group.strategy}
                return Resource(group.group_name, dict(self._backend.tags.get(group.group_id) or {}), keys)
        return Resource(name)

    def _allocation(self, name: str) -> str:
        """Return the allocation id for that id, an association's id or a public address."""
        for address in list(self._backend.addresses):
            if name in (address.allocation_id, address.association_id, address.public_ip):
                return str(address.allocation_id or name)
        return name

    def _image(self, name: str) -> Resource:
        image = self._backend.amis.get(name)
        if image is None:
            return Resource(name, public=True)
        owner = getattr(image, "image_owner_alias", None) or image.owner_id
        keys = {"ec2:Owner": str(owner), "ec2:ImageType": "machine", "ec2:RootDeviceType": "ebs"}
        return self._resource(name, keys, public=True)


def _first(by_zone: Any, name: str) -> Any:
    return next((items[name] for items in list(by_zone.values()) if name in items), None)
