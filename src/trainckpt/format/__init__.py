"""Stored formats as values. Mirrors docs/format.md; imports neither tensors nor storage."""
