"""Linux facilities that the simulator uses: namespaces, seccomp, processes, socket owners, private files.

Standard library only. Nothing here knows EC2, moto or what a node is for.
"""
