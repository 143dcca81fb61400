"""What one attempt of a run is: options, record, launch, and what its rank tells others."""
