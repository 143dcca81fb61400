"""Convert live objects to bytes and back. Besides `data`, the only package with tensors."""
