"""One file for each kind of state a run has."""
