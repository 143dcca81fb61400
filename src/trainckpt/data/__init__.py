"""Loaders that can be stopped at any batch and go on with the next one, bitwise."""
