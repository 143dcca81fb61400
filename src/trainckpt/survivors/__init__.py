"""Save the newest step on the ranks left after others have died."""
