"""Track data loaders: save a position at any batch and resume with the next one, bitwise."""
