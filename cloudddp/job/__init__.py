"""Jobs on a cluster: files to the nodes, ranks started, followed and stopped, results pulled back."""
