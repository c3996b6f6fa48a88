"""Patching of moto fails if moto is not as expected; look-ups of instance types."""

from __future__ import annotations

import pytest

from cloudddp.simulator.ec2 import catalog
from cloudddp.simulator.ec2.patch import add, wrap


class Theirs:
    def known(self) -> str:
        return "theirs"


def test_missing_method_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"Theirs\.gone.*moto 5\.2"):
        wrap(Theirs, "gone", lambda original: original)


def test_new_method_of_moto_is_not_overwritten() -> None:
    with pytest.raises(RuntimeError, match=r"Theirs\.known"):
        add(Theirs, known=lambda _: "ours")
    assert Theirs().known() == "theirs"


@pytest.mark.parametrize(
    ("instance_type", "on_demand", "spot"),
    [
        ("g4dn.xlarge", "on-demand-g", "spot-g"),
        ("gr6.4xlarge", "on-demand-g", "spot-g"),
        ("vt1.3xlarge", "on-demand-g", "spot-g"),
        ("p4d.24xlarge", "on-demand-p", "spot-p"),
        ("p5en.48xlarge", "on-demand-p", "spot-p5"),
        ("p6-b200.48xlarge", "on-demand-p", "spot-p5"),
        ("m5.large", "on-demand-standard", "spot-standard"),
        ("trn1.2xlarge", "on-demand-other", "spot-other"),
    ],
)
def test_quota_by_family(instance_type: str, on_demand: str, spot: str) -> None:
    assert catalog.quota(instance_type, spot=False) == on_demand
    assert catalog.quota(instance_type, spot=True) == spot
