"""How a TCP stream to a node's SSH server is opened: directly, through a jump host, or by a proxy command."""
