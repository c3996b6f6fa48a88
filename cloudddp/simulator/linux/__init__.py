"""Linux facilities that the simulator uses: namespaces, seccomp, processes, socket owners, private files.

Standard library only. Nothing here depends on EC2, moto or the purpose of a node.
"""
