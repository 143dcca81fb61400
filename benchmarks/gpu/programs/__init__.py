"""Training scripts that the stages run; each takes its device as an argument."""
