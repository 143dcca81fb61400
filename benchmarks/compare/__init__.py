"""Saves and restores of trainckpt and its peers, beside what memory and disk can do."""
