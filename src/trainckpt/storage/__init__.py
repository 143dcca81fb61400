"""Tiers: named bytes in, the same bytes out. The only package touching storage."""
