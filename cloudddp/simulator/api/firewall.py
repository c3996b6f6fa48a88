"""Keeps the lab's firewall in step with the security groups and routes of the account."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.guest import log
from cloudddp.simulator.hosts.lifecycle import Lifecycle
from cloudddp.simulator.net.policy import Policy
from cloudddp.simulator.net.router import Router
from cloudddp.simulator.net.security_groups import policy_for

if TYPE_CHECKING:
    from cloudddp.simulator.hosts.loopback import LoopbackHosts  # imports asyncssh


class LoopbackAddresses:
    """Takes the place of the firewall for process nodes: they answer on the Elastic IP that an API call gave
    them."""

    def __init__(self, hosts: LoopbackHosts, lifecycle: Lifecycle) -> None:
        self._hosts, self._lifecycle = hosts, lifecycle

    def update(self) -> None:
        """Never raises, as Firewall.update."""
        for instance in self._lifecycle.live():
            try:
                self._hosts.set_public_address(instance.id, instance.public_ip)
            except Exception as error:  # what asyncssh raises has no common base class with OSError
                log.write(f"{instance.id} does not answer on {instance.public_ip}: {error}")


class Firewall:
    """Call `update` after each API call and each change of a host."""

    def __init__(self, router: Router, lifecycle: Lifecycle) -> None:
        self._router = router
        self._lifecycle = lifecycle
        self._policy: Policy | None = None
        self._lock = threading.Lock()

    def update(self) -> None:
        """Apply the current policy.

        Never raises: it runs after a call has taken effect, whose response must follow. Rules that nft
        rejects are logged, and the previous ones stay in effect.
        """
        with self._lock:
            policy = policy_for(self._lifecycle.live(), CONDITIONS.read().vpn)
            if policy == self._policy:
                return
            try:
                self._router.apply(policy)
            except OSError as error:
                log.write(f"the firewall is unchanged: {error}")
                return
            self._policy = policy
