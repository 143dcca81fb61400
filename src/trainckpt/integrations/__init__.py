"""Trainers people already use. Each file looks at its framework before it relies on it."""
