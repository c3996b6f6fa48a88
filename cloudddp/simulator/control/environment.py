"""Points AWS clients at a simulator, and moves a process to its network."""

from __future__ import annotations

import os
from pathlib import Path

from cloudddp.errors import CloudDDPError
from cloudddp.simulator.control.record import Simulator
from cloudddp.simulator.linux import kernel

ACCESS_KEY = "simulated"
"""The access key id of whoever uses `environment`; the policy of `start` is that user's."""

HIDDEN = tuple(
    """
        AWS_PROFILE AWS_DEFAULT_PROFILE AWS_SESSION_TOKEN AWS_SECURITY_TOKEN AWS_CREDENTIAL_EXPIRATION
        AWS_ROLE_ARN AWS_ROLE_SESSION_NAME AWS_WEB_IDENTITY_TOKEN_FILE
        AWS_CONTAINER_CREDENTIALS_RELATIVE_URI AWS_CONTAINER_CREDENTIALS_FULL_URI
        AWS_CONTAINER_AUTHORIZATION_TOKEN AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE
        AWS_IGNORE_CONFIGURED_ENDPOINT_URLS AWS_ENDPOINT_URL_EC2 AWS_ENDPOINT_URL_SSM AWS_ENDPOINT_URL_STS
        AWS_ENDPOINT_URL_IAM AWS_ENDPOINT_URL_PRICING AWS_ENDPOINT_URL_SCHEDULER
        AWS_ENDPOINT_URL_SERVICE_QUOTAS AWS_USE_FIPS_ENDPOINT AWS_USE_DUALSTACK_ENDPOINT
    """.split()
)
"""Variables to remove in addition to setting `environment`: each could redirect a call, or supply a real
key."""


def environment(sim: Simulator) -> dict[str, str]:
    """Return the variables that point any AWS client, and cloudddp, at `sim`. Remove `HIDDEN` as well."""
    variables = {
        "AWS_ENDPOINT_URL": sim.endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": "simulated",
        "AWS_DEFAULT_REGION": sim.region,
        "AWS_REGION": sim.region,
        "AWS_EC2_METADATA_DISABLED": "true",
        # With no files to read, a profile on a command line is an error and not a real account.
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "CLOUDDDP_CHECKIP_URL": f"{sim.endpoint}/_cloudddp/address",
        "CLOUDDDP_CHECKSSH": sim.endpoint.removeprefix("http://"),
        "CLOUDDDP_SSH_PORT": str(sim.ssh_port),
    }
    for name in ("NO_PROXY", "no_proxy"):
        others = [item for item in os.environ.get(name, "").split(",") if item and item != "127.0.0.1"]
        variables[name] = ",".join([*others, "127.0.0.1"])
    return variables


def enter(sim: Simulator) -> None:
    """Move this process to the network of the simulator's nodes. It cannot leave again.

    No effect for process nodes. Call it while there is a single thread. Raises CloudDDPError.
    """
    if not sim.has_lab:
        return
    namespaces = Path(f"/proc/{sim.pid}/ns")
    try:
        if (namespaces / "user").readlink() != Path("/proc/self/ns/user").readlink():
            kernel.setns(namespaces / "user", kernel.CLONE_NEWUSER)
        kernel.setns(namespaces / "net", kernel.CLONE_NEWNET)
    except OSError as error:
        raise CloudDDPError(
            f"cannot enter the simulator's network: {error}", hint="cloudddp sim stop, then start it"
        ) from error


def use(sim: Simulator) -> None:
    """Enter the network of the simulator's nodes, and point the AWS clients of this process, and of the ones
    that it starts, at it."""
    enter(sim)
    for name in HIDDEN:
        os.environ.pop(name, None)
    os.environ.update(environment(sim))
