"""Injected network faults, by the private addresses of the nodes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Faults:
    """The faults in effect. Changes take effect with the next Router.apply."""

    cut: set[str] = field(default_factory=set)
    cut_pairs: set[frozenset[str]] = field(default_factory=set)
    cut_from: set[tuple[str, str]] = field(default_factory=set)  # sender, receiver
    drop_ssh: set[str] = field(default_factory=set)
    slow_ssh: set[str] = field(default_factory=set)

    def affects(self, address: str) -> bool:
        single = address in self.cut | self.drop_ssh | self.slow_ssh
        return single or any(address in pair for pair in (*self.cut_pairs, *self.cut_from))

    def heal(self, address: str) -> None:
        """Remove every fault of a node."""
        for addresses in (self.cut, self.drop_ssh, self.slow_ssh):
            addresses.discard(address)
        self.cut_pairs = {pair for pair in self.cut_pairs if address not in pair}
        self.cut_from = {pair for pair in self.cut_from if address not in pair}
