"""keygen: make a new identity to read encrypted checkpoints, and its public recipient."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.cli import output
from trainckpt.encryption import keys

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="new file for the private key, for its user only"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Write the identity, print the recipient."""
    identity = keys.generate()
    keys.write_identity(arguments.file, identity)
    if arguments.json:
        output.document({"identity": str(arguments.file), "recipient": identity.recipient})
        return 0
    print(identity.recipient)
    print(f'The trainer needs only that: encrypt_to="{identity.recipient}". {arguments.file} reads')
    print("what is encrypted to it: keep it, and copies of it, away from the machines that train.")
    print(f"To resume: TRAINCKPT_IDENTITY={arguments.file}, or --identity {arguments.file}.")
    return 0
