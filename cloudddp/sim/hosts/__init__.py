"""The hosts behind instances, of two kinds: namespace.py (OpenSSH in namespaces) and loopback.py (SSH on
127.0.0.0/8).

host_backend.py chooses the kind, node_spec.py describes what a host has to be, lifecycle.py ties hosts to
moto's instances.
"""
