"""What is on disk, as values. Mirrors docs/format.md; knows neither tensors nor storage."""
