"""Pure functions of measured facts: when to save, whether a save still fits, and where it goes."""
