"""The image of the nodes: checked against the instance type, and its login user."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.faults import Rewrite, with_value
from support.simlab import client_of

from cloudddp.aws import images, instance_types
from cloudddp.aws.client import AWS
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import UsageError

AMAZON_LINUX = (
    "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
)
BASE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


def found(aws: AWS, instance_type: str = "g5.xlarge", image: str = ClusterSpec().image) -> images.Image:
    """Return the image with which `up` would launch nodes of a type."""
    spec = replace(ClusterSpec(), instance_type=instance_type, image=image)
    return images.find(aws, spec, instance_types.describe(aws, spec))


def refused(aws: AWS, *words: str) -> str:
    with pytest.raises(UsageError) as caught:
        found(aws, *words)
    return f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("instance_type", "reason"),
    [
        ("g4ad.xlarge", "AMD Radeon Pro V520, and the default image has drivers for NVIDIA GPUs only"),
        ("inf2.xlarge", "AWS Inferentia2, and"),
        ("p3dn.24xlarge", "NVIDIA V100, and the driver of the default image requires a later GPU"),
    ],
)
def test_default_image_is_refused_for_types_without_a_driver(
    aws: AWS, instance_type: str, reason: str
) -> None:
    """The Deep Learning AMI with the open NVIDIA driver supports Turing and later."""
    message = refused(aws, instance_type)
    assert reason in message
    assert "--image" in message


def test_type_that_is_newer_than_the_default_image_is_a_warning(aws: AWS) -> None:
    """Its description lists the families ("Supported EC2 instances: ...", release notes of PyTorch 2.12)."""
    shown = found(aws, "g7e.2xlarge").warning
    assert "supports G4dn, G5, G6, Gr6, G6e, P4d, P4de, P5, P5e, P5en, P6-B200, not g7e.2xlarge" in shown
    assert f"if its GPUs do not appear: --image {BASE}" in shown


def test_default_image_of_an_arm64_type_is_for_arm64(aws: AWS, ec2: Any) -> None:
    (image,) = ec2.describe_images(ImageIds=[found(aws, "g5g.xlarge").id])["Images"]
    assert image["Architecture"] == "arm64"
    assert "PyTorch" in image["Name"]


@pytest.fixture
def register(ec2: Any) -> Iterator[Callable[..., str]]:
    """Register images of one's own, with the description and properties of the caller's choice."""
    created: list[str] = []

    def register(**more: Any) -> str:
        disk = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 8}}]
        image = {"Name": f"own-{len(created)}", "Architecture": "x86_64", "RootDeviceName": "/dev/sda1"}
        answer = ec2.register_image(**{**image, "BlockDeviceMappings": disk, **more})
        created.append(answer["ImageId"])
        return created[-1]

    yield register
    for image in created:
        ec2.deregister_image(ImageId=image)


def test_own_image_is_used_unless_it_cannot_boot(aws: AWS, register: Any) -> None:
    """Also for types that the default does not support."""
    assert found(aws, "g4ad.xlarge", image := register()).id == image
    message = refused(aws, "g5.xlarge", register(Architecture="arm64"))
    assert "is for arm64, g5.xlarge is x86_64" in message


def test_own_image_whose_description_excludes_the_type_is_a_warning(aws: AWS, register: Any) -> None:
    """An entry of the description includes its variants."""
    image = register(Description="Supported EC2 instances: G4dn, P4, P6. Release notes: none")
    warning = found(aws, "g5.xlarge", image).warning
    assert warning.startswith(f"{image} (own-0) supports G4dn, P4, P6, not g5.xlarge")
    for instance_type in ("p4de.24xlarge", "p6-b200.48xlarge", "g4dn.xlarge"):
        assert found(aws, instance_type, image).warning == ""


def test_other_volumes_of_an_image_are_named(aws: AWS, faults: Any) -> None:
    """They are created for each node, as its mapping says."""
    disk = b"<item><deviceName>/dev/sdb</deviceName><ebs><volumeSize>500</volumeSize></ebs></item>"
    mapping = b"<blockDeviceMapping>"
    faults.rewrite("DescribeImages", lambda body: body.replace(mapping, mapping + disk))
    assert found(aws).warning.startswith("the image has 500 GiB of volumes beside the root volume: billed")


WINDOWS = b"<platform>windows</platform><imageId>"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_value("rootDeviceType", "instance-store"), "its root device is not an EBS volume"),
        (with_value("imageState", "deregistered"), "it is not available"),
        (lambda body: body.replace(b"<imageId>", WINDOWS, 1), "it runs Windows"),
    ],
)
def test_image_that_cannot_boot_is_refused(
    aws: AWS, faults: Any, register: Any, change: Rewrite, reason: str
) -> None:
    """EC2 API reference, "Image": rootDeviceType, imageState and platform."""
    faults.rewrite("DescribeImages", change)
    assert reason in refused(aws, "g5.xlarge", register())


def test_unknown_image_and_parameter_are_refused(aws: AWS) -> None:
    assert "ami-0123456789abcdef0" in refused(aws, "g5.xlarge", "ami-0123456789abcdef0")
    message = refused(aws, "g5.xlarge", "/aws/service/deeplearning/none")
    assert "there is no SSM parameter /aws/service/deeplearning/none in us-east-1" in message


def test_parameter_that_holds_no_image_id_is_refused(aws: AWS, simulator: Any) -> None:
    ssm = client_of(simulator, "ssm")
    ssm.put_parameter(Name="/team/image", Value="\x1b[31mubuntu", Type="String", Overwrite=True)
    message = refused(aws, "g5.xlarge", "/team/image")
    assert "SSM parameter /team/image holds" in message
    assert "\x1b" not in message


def test_login_user_is_that_of_the_operating_system(cli: Any) -> None:
    """Amazon Linux: ec2-user (EC2 User Guide, "Default user names"). The simulator's nodes have only
    `ubuntu`, so `up` is refused there with a message that names the user."""
    err = cli.fails(1, "up", "-n", "1", "--image", AMAZON_LINUX, CLOUDDDP_READY_MINUTES="0.05")
    assert "the cluster's key is refused for user 'ec2-user'" in err
    records = [
        json.loads(p.read_text()) for p in Path(cli.env["CLOUDDDP_HOME"]).glob("clusters/*/cluster.json")
    ]
    assert {one["user"] for one in records if one["name"] == cli.cluster} == {"ec2-user"}
