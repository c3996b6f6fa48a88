"""The instance metadata service at 169.254.169.254, version 2 and, where the instance allows it, version 1.

A caller is identified by its source address, which a node cannot forge in the lab's network. Reads moto's
Instance and changes nothing.
"""
