"""Convert live objects to bytes and back. Besides the loader's, the only room with tensors."""
