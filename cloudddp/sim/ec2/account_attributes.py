"""DescribeAccountAttributes: the limit of Elastic IPs follows the condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2.account_conditions import CONDITIONS
from cloudddp.sim.ec2.patch import override

_ADDRESSES = ("max-elastic-ips", "vpc-max-elastic-ips")


def install() -> None:
    """Patch moto's answer, which always has 5."""
    from moto.ec2.responses.account_attributes import AccountAttributes

    override(AccountAttributes, "describe_account_attributes", _describe)


def _describe(original: Callable[..., Any], self: Any) -> Any:
    answer = original(self)
    wanted = self._get_param("AttributeNames", [])
    quota = CONDITIONS.read().quota.get("addresses")
    shown = [
        one for one in answer.result["AccountAttributes"] if not wanted or one["AttributeName"] in wanted
    ]
    for one in shown:
        if quota is not None and one["AttributeName"] in _ADDRESSES:
            one["AttributeValues"] = [{"AttributeValue": str(quota)}]
    answer.result["AccountAttributes"] = shown
    return answer
