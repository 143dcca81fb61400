"""Inspect, export or load snapshots without resuming their run."""
