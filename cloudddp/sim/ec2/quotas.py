"""How DescribeAccountAttributes and GetServiceQuota show the quotas that the conditions set.

moto's limit of Elastic IPs is always 5, and it knows only the quotas of VPC. What a quota refuses: see
capacity.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2.account_conditions import CONDITIONS
from cloudddp.sim.ec2.patch import override

_ADDRESSES = ("max-elastic-ips", "vpc-max-elastic-ips")


UNLIMITED = 100_000.0  # without a condition, nothing is limited

# quota code -> name of the condition; the codes are those of service `ec2`
_CODES = {
    "L-DB2E81BA": "on-demand-g",
    "L-417A185B": "on-demand-p",
    "L-1216C47A": "on-demand-standard",
    "L-3819A6DF": "spot-g",
    "L-7212CCBC": "spot-p",
    "L-C4BD4855": "spot-p5",
    "L-34B43A08": "spot-standard",
    "L-0263D0A3": "addresses",
}


def install() -> None:
    """Patch moto's answers."""
    from moto.ec2.responses.account_attributes import AccountAttributes
    from moto.servicequotas.models import ServiceQuotasBackend

    override(AccountAttributes, "describe_account_attributes", _describe)
    override(ServiceQuotasBackend, "get_service_quota", _with_ec2)


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


def _with_ec2(original: Callable[..., Any], self: Any, service_code: str, quota_code: str) -> dict[str, Any]:
    if service_code != "ec2" or quota_code not in _CODES:
        return dict(original(self, service_code=service_code, quota_code=quota_code))
    limit = CONDITIONS.read().quota.get(_CODES[quota_code], UNLIMITED)
    return {"ServiceCode": "ec2", "QuotaCode": quota_code, "Value": float(limit), "Adjustable": True}
