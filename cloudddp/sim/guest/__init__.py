"""What stands in for cloud-init, systemd, sudo and the NVIDIA driver on a namespace node.

These files are copied over a node's /usr and run there, by the host's Python with nothing but its standard
library. They act on the machine that they are on (they end it, at a deadline), so each asks `here` first.
"""
