"""Service Quotas of EC2: the vCPU quotas, as the conditions set them. moto knows those of VPC only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2.account_conditions import CONDITIONS
from cloudddp.sim.ec2.patch import override

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
    """Patch moto's GetServiceQuota."""
    from moto.servicequotas.models import ServiceQuotasBackend

    override(ServiceQuotasBackend, "get_service_quota", _with_ec2)


def _with_ec2(original: Callable[..., Any], self: Any, service_code: str, quota_code: str) -> dict[str, Any]:
    if service_code != "ec2" or quota_code not in _CODES:
        return dict(original(self, service_code=service_code, quota_code=quota_code))
    limit = CONDITIONS.read().quota.get(_CODES[quota_code], UNLIMITED)
    return {"ServiceCode": "ec2", "QuotaCode": quota_code, "Value": float(limit), "Adjustable": True}
