"""Live objects <-> bytes. The only room, beside the loader's, that touches tensors."""
