"""Convert live objects to bytes and back: most of what touches tensors is here and in `data`."""
