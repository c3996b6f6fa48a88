"""Stand-ins for cloud-init, systemd, sudo and the NVIDIA driver on a namespace node.

These files are copied over a node's /usr and run there by the host's Python, with the standard library only.
They act on the machine that they run on (they power it off at a deadline), so each of them calls
`on_node.require` first.
"""
