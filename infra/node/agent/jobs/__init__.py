"""What is recorded of the jobs on this node, in their folders: read and written by steps, guards, supervisors
and wrappers."""
