"""The imports and model files of a `cloudddp` process, which the zygote loads once for all of them."""

from __future__ import annotations

import importlib
import pkgutil

import boto3.session
import botocore.endpoint
import botocore.handlers
import botocore.parsers
import botocore.session
import msgspec  # noqa: F401
import paramiko  # noqa: F401

import cloudddp
import cloudddp.__main__
from cloudddp.config import schema
from cloudddp.simulator.ec2 import speed

# The modules of the simulator run in another process, except `control`.
OTHERS = "cloudddp.simulator."


def modules() -> list[str]:
    """Every module of the product that a command may import."""
    found = pkgutil.walk_packages(cloudddp.__path__, "cloudddp.")
    return [module.name for module in found if not module.name.startswith(OTHERS)]


for name in [*modules(), "cloudddp.simulator.control"]:
    importlib.import_module(name)

_shared = speed.data_files_parsed_once()  # for good: without a name it would end at once
_shared.__enter__()
_loader = botocore.session.Session().get_component("data_loader")
for name in ("endpoints", "partitions", "_retry", "sdk-default-configuration"):
    _loader.load_data(name)
_session = boto3.session.Session("key", "secret", region_name="us-east-1")
for service in ("ec2", "sts", "ssm", "service-quotas"):
    _session.client(service)  # loads its rules and makes its class
    for name in _loader.load_service_model(service, "service-2")["operations"]:
        botocore.xform_name(name)  # fills its cache
for section in schema.SECTIONS:
    schema.fields(section)  # fills its cache, too
