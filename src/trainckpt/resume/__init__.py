"""Resume: choose a snapshot, read and verify it on all ranks together, and apply it."""
