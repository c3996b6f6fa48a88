"""Keeps the lab's firewall in step with the security groups and routes of the account."""

from __future__ import annotations

import threading

from cloudddp.sim.ec2.account_conditions import CONDITIONS
from cloudddp.sim.guest import log
from cloudddp.sim.hosts.lifecycle import Lifecycle
from cloudddp.sim.net.policy import Policy
from cloudddp.sim.net.router import Router
from cloudddp.sim.net.security_groups import policy_for


class Firewall:
    """Call `update` after each API call and each change of a host. `router` is None for process nodes."""

    def __init__(self, router: Router | None, lifecycle: Lifecycle) -> None:
        self._router = router
        self._lifecycle = lifecycle
        self._policy: Policy | None = None
        self._lock = threading.Lock()

    def update(self) -> None:
        """Apply the current policy.

        Never raises: it runs after a call has taken effect, whose response must follow. Rules that nft rejects are
        logged, and the previous ones stay in effect.
        """
        if self._router is None:
            return
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
