"""The `trainckpt` command: one file a verb."""
