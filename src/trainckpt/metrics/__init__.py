"""Metrics of a run, published by rank 0: what they are, what they read, and where they go."""
