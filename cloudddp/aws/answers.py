"""Decodes what AWS answers, the only way to values and errors that the rest of cloudddp uses. An error says
what was refused and what to type next; its code is AWS's own.

An answer comes from AWS, or from whatever AWS_ENDPOINT_URL names, through any proxy in between. botocore
checks neither that a field exists nor how long it is, so each call has a record of the fields that it needs.
Text that is only shown is shortened where it is read; a value that is used (an id, a number, an address
block) has to be in its limits.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, TypeVar

import msgspec

from cloudddp.aws import denials
from cloudddp.errors import AWSError, CredentialsError, Message, UsageError
from cloudddp.text import one_line

T = TypeVar("T")

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[ -~]+\Z")]
"""An id or a name that a later call sends; safe to print."""

Address = Annotated[str, msgspec.Meta(pattern=r"^(((25[0-5]|2[0-4]\d|1?\d?\d)(\.(?!\Z)|\Z)){4})?\Z")]
"""An IPv4 address, or '' where there is none."""

Count = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]

_SHOWN = 200  # characters of the decoder's message, which can quote a value
# msgspec is not safe while it first reads the fields of a record: see agent/replies.py.
_lock = threading.Lock()


class Answer(msgspec.Struct, frozen=True, rename="pascal"):
    """A part of an answer; `vpc_id` is AWS's VpcId, and a field named "State.Name" what the part State has as
    its Name. Other fields are ignored."""


class Tagged(Answer, frozen=True, kw_only=True):
    """A part of an answer that has tags, which tags.decode reads."""

    tags: tuple[dict[str, str], ...] = ()

    def tag(self, key: str) -> str | None:
        """Return the value of a tag, None if it is not there."""
        return next((tag.get("Value", "") for tag in self.tags if tag.get("Key") == key), None)


def decode(answer: object, kind: type[T], call: str, region: str, key: str = "") -> T:
    """Return an answer as `kind`, or what it has under `key`. `call` is for the message, for example
    ec2:DescribeVpcs.

    Raises AWSError if a required field is missing, or a value is of another type or not in its limits.
    """
    try:
        found = _flat(answer)
        if key and key not in found:  # an empty listing has it too
            raise ValueError(f"it has no `{key}`")
        with _lock:
            return msgspec.convert(found[key] if key else found, kind)
    except (ValueError, TypeError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise malformed(call, region, str(error)) from None


def _flat(part: Any) -> Any:
    """Return a part of an answer whose fields have those of their own parts beside them, by their paths."""
    if isinstance(part, list):
        return [_flat(one) for one in part]
    if not isinstance(part, Mapping):
        return part
    found = {name: _flat(value) for name, value in part.items()}
    inner = {name: value for name, value in found.items() if isinstance(value, dict)}
    return found | {f"{name}.{key}": one for name, value in inner.items() for key, one in value.items()}


def malformed(call: str, region: str, reason: str) -> AWSError:
    """Return the error for an answer that cannot be used."""
    return AWSError(
        f"AWS's answer to {call} in {region} is not valid: {one_line(reason, _SHOWN)}",
        hint="repeat the command; if AWS_ENDPOINT_URL or a proxy is set, check what answers there",
    )


class _Launched(Answer, frozen=True):
    instance_id: Id
    ami_launch_index: Count = 0


# What the answer to a creating call has to name, by its method.
CREATED: dict[str, tuple[str, Any]] = {
    "run_instances": ("Instances", list[_Launched]),
    "create_security_group": ("GroupId", Id),
}


CREDENTIALS_HINT = Message(
    "run `aws configure`, or set AWS_PROFILE; to try cloudddp without an account: `cloudddp --sim up`"
)

AGAIN = Message("`cloudddp down`, then `cloudddp up` again")

SHORTAGES = ("InsufficientInstanceCapacity", "InsufficientHostCapacity")  # HTTP status 500
THROTTLED = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled")
_NOT_ACCEPTED = (
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
    "AuthFailure",
)
# error code -> what to do next
HINTS: dict[str, str] = {
    **dict.fromkeys(_NOT_ACCEPTED, CREDENTIALS_HINT),
    "AuthFailure": Message(
        "if only this region refuses them, enable it for the account or choose another; else "
        f"{CREDENTIALS_HINT}"
    ),
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": Message(
        "spot's first use: `aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`"
    ),
    "OptInRequired": "enable the region or EC2 for this account in the AWS console",
    "VcpuLimitExceeded": Message(
        "ask for a higher EC2 vCPU quota of this family in the Service Quotas console, or use fewer nodes; "
        "`cloudddp doctor` names the quota"
    ),
    "InstanceLimitExceeded": "ask for a higher EC2 quota in the Service Quotas console, or use fewer nodes",
    "MaxSpotInstanceCountExceeded": Message(
        "ask for a higher spot quota in the Service Quotas console, or omit --spot; `cloudddp doctor` names "
        "the quota"
    ),
    "PendingVerification": "AWS is verifying the account and sends an e-mail when it has finished",
    **dict.fromkeys(
        SHORTAGES,
        "AWS has no free capacity in this zone now: add --zones or --regions, use --no-placement-group, keep "
        "trying with --wait-capacity 2h, or choose another --instance-type",
    ),
    "Unsupported": "this zone does not offer the type: give other --zones",
    "SpotMaxPriceTooLow": "omit --spot",
    "IdempotentInstanceTerminated": Message(f"the nodes of this launch have already terminated: {AGAIN}"),
    "IdempotentParameterMismatch": Message(f"an earlier launch had other parameters: {AGAIN}"),
    "InsufficientAddressCapacity": "AWS has no free public address now: wait some minutes and repeat the "
    "command",
    "InsufficientFreeAddressesInSubnet": "the subnet is full: give other --subnets",
    **dict.fromkeys(THROTTLED, "AWS throttles this account: wait a minute and repeat the command"),
    "InvalidAMIID.NotFound": "the image does not exist in this region: see `image` in cloudddp.toml",
    "InvalidAMIID.Malformed": "see `image` in cloudddp.toml",
    "InvalidSubnetID.NotFound": "see `subnets` in cloudddp.toml, and the region",
    "InvalidVpcID.NotFound": "see `vpc` in cloudddp.toml, and the region",
    "ReservationCapacityExceeded": "the capacity reservation is full, or does not fit the nodes: see "
    "`reservation` in cloudddp.toml",
    "PlacementGroupLimitExceeded": "delete placement groups that are not used, or add --no-placement-group",
    "InvalidInstanceType": "see `instance_type` in cloudddp.toml",
    "ParameterNotFound": "see `image` in cloudddp.toml: no such SSM parameter in this region",
    "PreconditionFailed": "the object has changed meanwhile: repeat the command",
    "OperationNotPermitted": "the instance has termination protection: disable it in the AWS console",
}


EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")  # the last one is EC2's
"""The codes for credentials that have ended."""
REGION_REFUSED = ("AuthFailure", "OptInRequired")
"""The codes of a region that refuses credentials which other regions accept."""
_SHOWN_TEXT = 600  # characters of a message of AWS, which names roles and resources, and can be long
_SHOWN_CODE = 100
_MOST_SKEW = 240.0  # seconds; a signature is valid for 300


def action(service: str, method: str) -> str:
    """Return the name that IAM has for a call of botocore: ec2:RunInstances for ec2, run_instances. Users
    grant that name."""
    prefix = service.replace("-", "")  # service-quotas has the actions servicequotas:...
    return f"{prefix}:{''.join(word.capitalize() for word in method.split('_'))}"


@contextlib.contextmanager
def explain(call: str, region: str, renew: str = "", decode: denials.Decode = lambda _: "") -> Iterator[None]:
    """Raise errors of botocore inside the block as ours. `call` is for messages, for example
    ec2:RunInstances.

    `renew` says how to renew the credentials. `decode` decodes the message about a denied call.
    """
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    try:
        yield
    except exceptions.ClientError as error:
        refusal = _refused(call, region, error, renew, decode)
        metadata = error.response.get("ResponseMetadata", {})
        refusal.retries = int(metadata.get("RetryAttempts") or 0)
        refusal.transient = refusal.code in THROTTLED or int(metadata.get("HTTPStatusCode") or 0) >= 500
        raise refusal from None
    except (exceptions.EndpointConnectionError, exceptions.HTTPClientError) as error:
        lost = unreachable(f"{call} in {region}", error)
        lost.unsent = isinstance(
            error,
            exceptions.EndpointConnectionError
            | exceptions.ConnectTimeoutError
            | exceptions.ProxyConnectionError,
        )
        raise lost from None
    except UnicodeEncodeError:
        raise UsageError(
            "AWS configuration: a value contains characters that cannot be sent",
            hint="check the AWS_* variables and ~/.aws/credentials",
        ) from None
    except exceptions.ParamValidationError as error:
        raise UsageError(f"{call}: {shown(error)}") from None
    except (exceptions.BotoCoreError, ResponseParserError) as error:
        raise AWSError(f"{call} in {region} failed: {shown(error)}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        if not _is_of_parser(error):
            raise
        raise malformed(call, region, str(error)) from None


def _is_of_parser(error: BaseException) -> bool:
    """Return whether botocore's parser raised it, which converts the text of numbers and times without a
    check."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "botocore.parsers" for frame, _ in frames)


def shown(text: object) -> str:
    """Return a message of AWS or botocore on one line of limited length: it may contain a whole answer."""
    return one_line(" ".join(str(text).split()), _SHOWN_TEXT)


def unreachable(purpose: str, error: Exception) -> AWSError:
    """Return the error for an endpoint that does not answer."""
    found = AWSError(
        f"cannot reach AWS for {purpose}: {shown(error)}",
        hint="check your network and the region; if AWS_ENDPOINT_URL is set, check that the endpoint is "
        "running",
    )
    found.transient = True
    return found


def _refused(call: str, region: str, refusal: Any, renew: str, decode: denials.Decode) -> AWSError:
    response: Mapping[str, Any] = refusal.response
    error = response.get("Error", {})
    code, message = one_line(str(error.get("Code", "")), _SHOWN_CODE), str(error.get("Message", ""))
    if code in denials.CODES:
        return denials.denied(code, message, call, region, decode)
    if (clock := skewed(response, code)) is not None:
        return clock
    text = f"AWS refused {call}: {code}: {shown(message)}"
    if code in EXPIRED:
        return CredentialsError(f"{text}: your AWS credentials have expired", renew=renew, code=code)
    if code in _NOT_ACCEPTED and (code != "AuthFailure" or "access credentials" in message):
        return CredentialsError(text, renew=renew, hint=HINTS[code], code=code)
    return AWSError(text, hint=HINTS.get(code, ""), code=code)


def skewed(response: Mapping[str, Any], code: str) -> AWSError | None:
    """Return the error for a request that was refused because this computer's clock is wrong; None for
    another reason.

    AWS has the same codes for a wrong clock and for wrong or expired credentials; its clock is in the
    response's `Date`.
    """
    if code not in (*EXPIRED, *_NOT_ACCEPTED, "InvalidSignatureException", "RequestTimeTooSkewed"):
        return None
    try:
        date = parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"])
        ahead = (datetime.now(UTC) - date).total_seconds()
    except (LookupError, TypeError, ValueError):
        return None
    if abs(ahead) < _MOST_SKEW:
        return None
    off = f"{abs(ahead) / 60:.0f} minutes {'ahead of' if ahead > 0 else 'behind'} AWS's clock"
    return AWSError(
        f"AWS refused the request ({code}): the clock of this computer is {off}",
        hint="set the clock (on Linux `sudo timedatectl set-ntp true`), then repeat the command",
        code="ClockSkew",
    )
