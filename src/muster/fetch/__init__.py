"""Brings the files of a model to a node: from its disk, from another node, from the hub."""
