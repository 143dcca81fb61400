"""Tiers: named bytes in, the same bytes out. The only room touching storage."""
