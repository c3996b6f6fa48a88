"""What the nodes boot from: the machine image, whether the instance type can run it, its login user; and the
KMS key that encrypts its root volume, checked before EC2 uses it. Read-only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from msgspec import field

from cloudddp.aws.answers import Answer, Count, Id
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.config.cluster_spec import ClusterSpec, Machine
from cloudddp.errors import AWSError, UsageError
from cloudddp.text import one_line

# Of the open kernel modules in AWS's images: "supported on Turing and later" (NVIDIA driver README, "Open
# Linux Kernel Modules").
_BEFORE_TURING = ("K80", "M60", "P100", "V100")
# The description of AWS's Deep Learning AMIs: "Supported EC2 instances: G4dn, G5, P4, P5, P6-B200. Release
# notes: ...".
_SUPPORTED = re.compile(r"Supported EC2 instances:\s*([A-Za-z0-9 ,-]{1,400})\.")
# The Deep Learning AMI without a framework.
_BASE = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
_ALLOWED = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-allowed-amis.html"

LINUX = "Linux/UNIX"  # EC2's name of the platform


@dataclass(frozen=True, slots=True)
class Image:
    """A machine image. `disk_gb` is the smallest size of its root volume, the size of its snapshot;
    `platform` is EC2's PlatformDetails."""

    id: str
    name: str
    root_device: str
    disk_gb: int
    user: str
    warning: str = ""  # why it may not fit the type, for an image that the user has chosen
    platform: str = LINUX


class _Disk(Answer, frozen=True):
    device_name: str = ""
    volume_size: Count = field(name="Ebs.VolumeSize", default=0)


class _Image(Answer, frozen=True):
    """The fields that say whether an image boots are optional: what EC2 leaves out does not exclude it."""

    name: str = ""
    description: str = ""
    architecture: str = ""
    state: str = ""
    root_device_type: str = ""
    root_device_name: Id = "/dev/sda1"
    platform: str = ""
    platform_details: str = ""
    block_device_mappings: tuple[_Disk, ...] = ()


def find(aws: AWS, spec: Machine, info: TypeInfo) -> Image:
    """Return the image of `spec.image`, an id or an SSM parameter. Two AWS calls at most.

    Raises UsageError if the type cannot run it: another architecture, no EBS root volume, Windows, or a GPU
    that the image has no driver for. What an image's text says of itself is a warning: AWS's images of the
    same weeks have the same driver, and only those without PyTorch list G7 and P6-B300 (Deep Learning AMI
    release notes, July 2026).
    """
    _require_driver(spec, info)
    image_id = _image_id(aws, spec, info.arch)
    found = _describe(aws, image_id)
    _require_bootable(image_id, found, info)
    name = one_line(found.name, 128)
    warning = "; ".join(filter(None, (_unsupported(image_id, found, info), _other_volumes(found))))
    root = found.root_device_name
    sizes = [disk.volume_size for disk in found.block_device_mappings if disk.device_name == root]
    platform = one_line(found.platform_details or LINUX, 60)
    return Image(image_id, name, root, max(sizes, default=0), _login_user(name, root), warning, platform)


def _describe(aws: AWS, image_id: str) -> _Image:
    found = aws.listed("describe_images", _Image, absent="InvalidAMIID", ImageIds=[image_id])
    if not found:
        raise UsageError(
            f"image {image_id} does not exist in {aws.region}, or you may not use it",
            hint="images belong to one region: see `image` in cloudddp.toml. Or the "
            f"account's Allowed AMIs setting hides it ({_ALLOWED})",
        )
    return found[0]


def _require_driver(spec: Machine, info: TypeInfo) -> None:
    """Raise UsageError for an accelerator that the default image has no driver for."""
    if spec.image != ClusterSpec().image:
        return
    why = ""
    if info.accelerator:
        why = f"{info.name} has {info.accelerator}, and the default image has drivers for NVIDIA GPUs only"
    elif any(info.gpu_name.endswith(f" {model}") for model in _BEFORE_TURING):
        why = (
            f"{info.name} has {info.gpu_name}, and the driver of the default image requires a later GPU "
            "(Turing)"
        )
    if why:
        raise UsageError(
            why, hint="give an image that supports the type: --image ami-...; or choose another type"
        )


def _image_id(aws: AWS, spec: Machine, arch: str) -> str:
    if not spec.image.startswith("/"):
        return spec.image
    name = spec.image.replace("{arch}", arch)
    try:
        value = aws.read("ssm", "get_parameter", str, "Parameter.Value", Name=name)
    except AWSError as error:
        if error.code != "ParameterNotFound":
            raise
        raise UsageError(
            f"there is no SSM parameter {name} in {aws.region}",
            hint="give an image id of this region (--image ami-...), or another parameter: AWS "
            "publishes fewer versions for arm64, and replaces old ones",
        ) from None
    if not re.fullmatch(r"ami-[0-9a-f]{8,32}", value):
        raise UsageError(
            f"SSM parameter {name} holds {one_line(value, 60)!r}, which is not an image id",
            hint="see `image`",
        )
    return value


def _require_bootable(image_id: str, image: _Image, info: TypeInfo) -> None:
    arch = image.architecture or info.arch
    if arch != info.arch:
        raise UsageError(
            f"image {image_id} is for {one_line(arch, 20)}, {info.name} is {info.arch}",
            hint="{arch} in an SSM parameter's name becomes the architecture of the type",
        )
    problems = {
        "it is not available": image.state not in ("", "available"),
        "its root device is not an EBS volume": image.root_device_type not in ("", "ebs"),
        "it runs Windows": image.platform.lower() == "windows",
    }
    if found := [problem for problem, applies in problems.items() if applies]:
        raise UsageError(f"image {image_id} cannot be used: {'; '.join(found)}", hint="give another --image")


def _unsupported(image_id: str, image: _Image, info: TypeInfo) -> str:
    """Return why the image's description excludes the type, or ''. An entry such as P4 includes p4d and
    p4de."""
    listed = _SUPPORTED.search(image.description)
    if listed is None or not info.gpus:
        return ""
    families = [one.strip().lower() for one in listed.group(1).split(",")]
    family = info.family.lower()
    if any(family == one or re.fullmatch(rf"{re.escape(one)}[a-z-].*", family) for one in families if one):
        return ""
    return (
        f"{image_id} ({one_line(image.name, 80)}) supports {listed.group(1)}, not {info.name}; if its GPUs "
        f"do not appear: --image {_BASE.format(arch=info.arch)}, which has no PyTorch "
        "(docs/aws.md, Images without PyTorch)"
    )


def _other_volumes(image: _Image) -> str:
    """Return what else an image creates for each node, or ''."""
    disks = image.block_device_mappings
    extra = sum(disk.volume_size for disk in disks if disk.device_name != image.root_device_name)
    text = f"the image has {extra} GiB of volumes beside the root volume: billed, and not counted above"
    return text if extra else ""


def _login_user(name: str, root_device: str) -> str:
    """Return the login user of the image's operating system (EC2 User Guide, "Default user name")."""
    words = name.lower()
    if "ubuntu" in words:
        return "ubuntu"
    if "debian" in words:
        return "admin"
    if "amazon linux" in words or "amzn" in words or "al2023" in words or root_device == "/dev/xvda":
        return "ec2-user"
    return "ubuntu"


class _Key(Answer, frozen=True):
    key_state: Id
    key_spec: Id = "SYMMETRIC_DEFAULT"


def key_problem(aws: AWS, key: str) -> str:
    """Return why EC2 cannot encrypt volumes with a key, or ''. One AWS call. Raises AWSError, also if there
    is no such key.

    EBS needs an enabled symmetric key (Amazon EBS User Guide, "Requirements for Amazon EBS encryption").
    """
    found = aws.read("kms", "describe_key", _Key, "KeyMetadata", KeyId=key)
    if found.key_state != "Enabled":
        return f"it is {found.key_state}"
    return "" if found.key_spec == "SYMMETRIC_DEFAULT" else f"it is not symmetric ({found.key_spec})"
