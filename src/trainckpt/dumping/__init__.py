"""Process dumps on the attempt's side: their contents, the messages about them, and their
copies."""
