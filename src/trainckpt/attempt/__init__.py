"""One attempt of a run: options, record, launch, and the status of its rank for others."""
