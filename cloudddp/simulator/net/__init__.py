"""The network of the simulated nodes: the lab's router and firewall, faults, and the addresses of
instances."""
