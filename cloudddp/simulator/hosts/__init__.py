"""The hosts behind instances, of three kinds: namespaces/ and machines/ on the lab's network, which
lab_hosts.py boots, and loopback.py (SSH on 127.0.0.0/8).

host_backend.py chooses the kind, node_spec.py describes what a host has to be, lifecycle.py ties hosts to
moto's instances.
"""
