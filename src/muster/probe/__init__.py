"""What a machine is: parsers of what its tools print, and the probe that runs them. Knows nothing of clusters."""
