"""Translates botocore's errors: what was refused, and what to type next. Codes are AWS's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cloudddp.aws import denials
from cloudddp.errors import AWSError, CloudDDPError, Command, Text, UsageError

CREDENTIALS_HINT: Text = (
    "run `aws configure`, or set AWS_PROFILE; to try cloudddp without an account: ", Command("--sim", "up")
)  # fmt: skip

AGAIN = (Command("down"), ", then ", Command("up"), " again")

# error code -> what to do next
HINTS: dict[str, Text] = {
    "AuthFailure": CREDENTIALS_HINT,
    "InvalidClientTokenId": CREDENTIALS_HINT,
    "UnrecognizedClientException": CREDENTIALS_HINT,
    "SignatureDoesNotMatch": CREDENTIALS_HINT,
    "ExpiredToken": "your credentials have expired: log in again (`aws sso login`), then repeat the command",
    "ExpiredTokenException": "your credentials have expired: log in again (`aws sso login`), then repeat the command",
    "RequestExpired": "your credentials or your clock are out of date: log in again, check the time",
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": "spot's first use: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
    "OptInRequired": "enable the region or EC2 for this account in the AWS console",
    "VcpuLimitExceeded": "ask for a higher EC2 vCPU quota of this family in the Service Quotas console, or use fewer nodes",
    "InstanceLimitExceeded": "ask for a higher EC2 quota in the Service Quotas console, or use fewer nodes",
    "MaxSpotInstanceCountExceeded": "ask for a higher spot quota in the Service Quotas console, or omit --spot",
    "PendingVerification": "AWS is verifying the account and sends an e-mail when it has finished",
    "InsufficientInstanceCapacity": "AWS has no free capacity in this zone now: add --zones or --regions, keep trying with --wait-capacity 2h, or choose another --instance-type",
    "InsufficientHostCapacity": "AWS has no free capacity in this zone now: add --zones or --regions, keep trying with --wait-capacity 2h, or choose another --instance-type",
    "Unsupported": "this zone does not offer the type: give other --zones",
    "SpotMaxPriceTooLow": "omit --spot",
    "IdempotentInstanceTerminated": ("the nodes of this launch have already terminated: ", *AGAIN),
    "IdempotentParameterMismatch": ("an earlier launch had other parameters: ", *AGAIN),
    "InsufficientAddressCapacity": "AWS has no free public address now: wait some minutes and repeat the command",
    "InsufficientFreeAddressesInSubnet": "the subnet is full: give other --subnets",
    "RequestLimitExceeded": "AWS throttles this account: wait a minute and repeat the command",
    "Throttling": "AWS throttles this account: wait a minute and repeat the command",
    "InvalidAMIID.NotFound": "the image does not exist in this region: see `image` in cloudddp.toml",
    "InvalidAMIID.Malformed": "see `image` in cloudddp.toml",
    "InvalidSubnetID.NotFound": "see `subnets` in cloudddp.toml, and the region",
    "InvalidVpcID.NotFound": "see `vpc` in cloudddp.toml, and the region",
    "InvalidInstanceType": "see `instance_type` in cloudddp.toml",
    "ParameterNotFound": "see `image` in cloudddp.toml: no such SSM parameter in this region",
    "OperationNotPermitted": "the instance has termination protection: disable it in the AWS console",
}


@contextlib.contextmanager
def explain(call: str, region: str, decode: denials.Decode = lambda _: "") -> Iterator[None]:
    """Raise errors of botocore inside the block as ours. `call` is for messages, for example ec2:run_instances.

    `decode` decodes the message about a denied call.
    """
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    try:
        yield
    except exceptions.ClientError as error:
        raise _refused(call, error.operation_name, error.response.get("Error", {}), decode) from None
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError):
        raise CloudDDPError("no AWS credentials found", hint=CREDENTIALS_HINT) from None
    except (
        exceptions.TokenRetrievalError,
        exceptions.SSOError,
        exceptions.CredentialRetrievalError,
    ) as error:
        raise CloudDDPError(
            f"cannot load AWS credentials: {error}", hint="log in again (`aws sso login`)"
        ) from None
    except (exceptions.EndpointConnectionError, exceptions.HTTPClientError) as error:
        raise AWSError(
            f"cannot reach AWS for {call} in {region}: {error}",
            hint="check your network and the region; if AWS_ENDPOINT_URL is set, check that the endpoint is running",
        ) from None
    except UnicodeEncodeError:
        raise UsageError(
            "AWS configuration: a value contains characters that cannot be sent",
            hint="check the AWS_* variables and ~/.aws/credentials",
        ) from None
    except exceptions.ParamValidationError as error:
        raise UsageError(f"{call}: {error}") from None
    except (exceptions.BotoCoreError, ResponseParserError) as error:
        raise AWSError(f"{call} in {region} failed: {error}") from None


def _refused(call: str, operation: str, error: dict[str, str], decode: denials.Decode) -> AWSError:
    code, message = error.get("Code", ""), error.get("Message", "")
    if code in denials.CODES:
        prefix = call.partition(":")[0].replace(
            "-", ""
        )  # boto3's service-quotas has the actions servicequotas:...
        return denials.denied(code, message, f"{prefix}:{operation}", decode)
    return AWSError(f"AWS refused {call}: {code}: {message}", hint=HINTS.get(code, ""), code=code)
