"""The resident process on a node: acts on events, owns the node's runners, reports what happens to them."""
