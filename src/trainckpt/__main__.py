"""`python -m trainckpt`: the command, where its folder is not on the path."""

from __future__ import annotations

from trainckpt.cli.main import entry

if __name__ == "__main__":
    entry()
