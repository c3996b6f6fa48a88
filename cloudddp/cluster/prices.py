"""EC2 prices in USD: a dated table of on-demand prices, and the cost of a cluster per hour. Pure.

A price is looked up here, or given by the user; it is never guessed and never 0. Spot capacity counts at the on-demand
price, which is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

TABLE_DATE = "2026-07-20"  # AWS price list as published by karpenter-provider-aws at commit 1d92708

# USD per instance and hour, Linux, on-demand, us-east-1. Without P3: the driver of the Deep Learning AMIs does not support the V100.
US_EAST_1 = {
    "p4d.24xlarge": 21.958,
    "p4de.24xlarge": 27.447,
    "p5.4xlarge": 6.88,
    "p5.48xlarge": 55.04,
    "p5en.48xlarge": 63.296,
    "p6-b200.48xlarge": 113.933,
    "p6-b300.48xlarge": 142.416,
    "g4dn.xlarge": 0.526,
    "g4dn.12xlarge": 3.912,
    "g4dn.metal": 7.824,
    "g5.xlarge": 1.006,
    "g5.2xlarge": 1.212,
    "g5.8xlarge": 2.448,
    "g5.12xlarge": 5.672,
    "g5.48xlarge": 16.288,
    "g6.xlarge": 0.805,
    "g6.2xlarge": 0.978,
    "g6.8xlarge": 2.014,
    "g6.12xlarge": 4.602,
    "g6.48xlarge": 13.350,
    "g6e.xlarge": 1.861,
    "g6e.8xlarge": 4.529,
    "g6e.12xlarge": 10.493,
    "g6e.24xlarge": 15.066,
    "g6e.48xlarge": 30.131,
    "g7.2xlarge": 2.52,
    "g7.8xlarge": 4.086,
    "g7.12xlarge": 7.128,
    "g7.24xlarge": 14.257,
    "g7.48xlarge": 28.513,
    "g7e.2xlarge": 3.363,
    "g7e.8xlarge": 5.268,
    "g7e.12xlarge": 8.286,
    "g7e.24xlarge": 16.572,
    "g7e.48xlarge": 33.144,
}
GP3_GIB_MONTH = 0.08  # EBS gp3 storage, us-east-1
PUBLIC_IPV4_HOUR = 0.005
HOURS_A_MONTH = 730


@dataclass(frozen=True, slots=True)
class Price:
    """What a cluster costs while it exists."""

    node_hour: float  # USD, one node
    nodes: int
    disk_gb: int
    source: str  # for people: where node_hour comes from

    @property
    def extras_hour(self) -> float:
        """USD per hour for disks and public addresses; traffic is not included."""
        return self.nodes * (self.disk_gb * GP3_GIB_MONTH / HOURS_A_MONTH + PUBLIC_IPV4_HOUR)

    @property
    def hour(self) -> float:
        """USD per hour for the whole cluster."""
        return self.nodes * self.node_hour + self.extras_hour


def billed_hours(seconds: float) -> float:
    """Return the hours that EC2 bills for a node: per second, with a minimum of 60 seconds."""
    return max(seconds, 60.0) / 3600


def node_hour(instance_type: str, region: str) -> float | None:
    """Return the on-demand price of one node, USD per hour, or None if it is not in the table."""
    return US_EAST_1.get(instance_type) if region == "us-east-1" else None
