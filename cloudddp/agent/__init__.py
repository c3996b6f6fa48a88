"""The laptop's side of the node agent: building and calling it, decoding its replies; and the protocol of
both sides."""
