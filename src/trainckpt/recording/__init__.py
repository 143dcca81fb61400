"""Record a run from inside it, for `trainckpt prove`, and protect the script's own files."""
