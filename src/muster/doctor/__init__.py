"""Checks of this machine and of a cluster: what is wrong, how that is known, and what helps."""
