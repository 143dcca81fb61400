"""Copies of committed snapshots, made beside training: on other hosts, and in slower tiers."""
