"""Snapshots looked at, exported or loaded without resuming their run."""
