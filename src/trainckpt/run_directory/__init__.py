"""A run's location: its run directory, its slower tiers, and their availability."""
