"""How exact a resume is, with each framework's own checkpoints and with trainckpt."""
