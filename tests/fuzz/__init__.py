"""A coverage-guided fuzzer of everything that is parsed. `python -m tests.fuzz --help`."""
