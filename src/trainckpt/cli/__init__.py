"""The `trainckpt` command: one file a verb, or for two that share their work."""
