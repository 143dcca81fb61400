"""Copies of an attempt's snapshots in its slower tiers, made beside training."""
