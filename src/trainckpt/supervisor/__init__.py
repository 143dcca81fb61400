"""Launches commands, and answers for how they end: signals, restarts, deadlines, exit codes."""
