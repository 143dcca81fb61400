"""Ways an attempt ends: the notices, the final save within the deadline, and the exit."""
