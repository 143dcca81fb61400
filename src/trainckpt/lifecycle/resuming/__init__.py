"""A resume: which snapshot, read and verified by all ranks together, and put back."""
