"""The laptop's side of the node agent: ships it, calls it, decodes its replies. Both sides use protocol/."""
