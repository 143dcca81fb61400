"""Is the advice good, and the simulator right? Against real runs whose attempts are killed."""
