"""Tiers: named bytes in, the same bytes out. The only room that touches storage."""
