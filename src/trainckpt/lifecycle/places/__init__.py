"""Where a run lies: its place, its slower tiers, and which of them answer."""
