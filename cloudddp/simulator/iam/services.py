"""Which checks a call needs, by service."""

from __future__ import annotations

from cloudddp.simulator.iam import ec2
from cloudddp.simulator.iam.evaluate import Check
from cloudddp.simulator.iam.request import Request, Resources

# "No permissions are required to perform this operation", even with an explicit deny (STS API Reference,
# GetCallerIdentity; GetSessionToken).
UNCHECKED = ("sts:GetCallerIdentity", "sts:GetSessionToken")
# "Permissions for users" in "Requirements for Amazon EBS encryption" (Amazon EBS User Guide); ReEncrypt is
# two actions.
_USE_OF_KEY = (
    "CreateGrant",
    "Decrypt",
    "DescribeKey",
    "GenerateDataKeyWithoutPlaintext",
    "ReEncryptFrom",
    "ReEncryptTo",
)


def checks(request: Request, resources: Resources) -> list[Check]:
    """Return every check of a call; all have to be allowed. A service that is not listed is checked on
    `*`."""
    if request.name in UNCHECKED:
        return []
    if request.service == "ec2":
        return ec2.checks(request, resources)
    if request.service == "ssm" and (names := request.values("Name") + request.values("Names")):
        return [request.check(_parameter(request, name)) for name in names]
    if request.service == "sts" and (role := request.text("RoleArn")):
        return [request.check(role)]
    if request.service == "servicequotas" and (code := request.text("QuotaCode")):
        service = request.text("ServiceCode")
        arn = f"arn:aws:servicequotas:{request.region}:{request.account}:{service}/{code}"
        return [request.check(arn, {"servicequotas:service": (service,)})]
    if request.service == "kms" and (key := request.text("KeyId")):
        is_arn = key.startswith("arn:")
        return [request.check(key if is_arn else f"arn:aws:kms:{request.region}:{request.account}:key/{key}")]
    return [request.check("*")]


def key_checks(request: Request, key: str) -> list[Check]:
    """Return the checks of the key of a volume, which EC2 makes for the caller after it has accepted a
    launch."""
    keys = {
        "kms:ViaService": (f"ec2.{request.region}.amazonaws.com",),
        "kms:GrantIsForAWSResource": ("true",),
    }
    return [request.check(key, keys, action=f"kms:{action}") for action in _USE_OF_KEY]


def _parameter(request: Request, name: str) -> str:
    """Return the ARN of an SSM parameter. The public ones, /aws/service/..., belong to no account."""
    account = "" if name.startswith("/aws/service/") else request.account
    return f"arn:aws:ssm:{request.region}:{account}:parameter/{name.lstrip('/')}"
