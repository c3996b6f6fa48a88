"""A job on this node, together with the agents of the other nodes: the guard and its supervisor, from the
start to the verdict."""
