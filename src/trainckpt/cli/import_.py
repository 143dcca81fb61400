"""import: take over a checkpoint of another library, as a new run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.options import read_options
from trainckpt.cli import output
from trainckpt.encryption.keys import must_be_there, parse_recipients
from trainckpt.errors import ConfigurationError
from trainckpt.run_directory.run_url import open_tier_at

if TYPE_CHECKING:
    from trainckpt.inspect.import_sources import ImportedState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add = parser.add_argument
    add("source", metavar="SRC", type=Path, help="file or folder of another library")
    add("run", metavar="RUN", help="new run directory")
    add("--epoch", type=_number, metavar="N", help="begin with epoch N (from 0)")
    add("--step", type=_number, metavar="N", help="optimizer steps so far")
    add(
        "--rename",
        type=_rename,
        action="append",
        default=[],
        metavar="KEY=NAME",
        help="track the part KEY of the source as NAME",
    )
    add(
        "--without",
        action="append",
        default=[],
        metavar="KEY",
        help="leave out the part KEY of the source",
    )
    add("--encrypt-to", metavar="RECIPIENTS", help="encrypt the new run's snapshot")


def execute(arguments: argparse.Namespace) -> int:
    """Open the source, write the run, say what came and what did not."""
    from trainckpt.inspect import import_run, import_sources

    options = read_options({"encrypt_to": arguments.encrypt_to})
    recipients: tuple[str, ...] = ()
    if options.encrypt_to:
        must_be_there()
        recipients = parse_recipients(options.encrypt_to)
    tier = open_tier_at(arguments.run, "local")
    import_run.must_be_free(tier)
    source = arguments.source.absolute()
    with tempfile.TemporaryDirectory(prefix="trainckpt-import-", dir=_scratch(tier.url)) as folder:
        state = import_sources.open_checkpoint(source, Path(folder))
        _change(state, arguments)
        with output.progress() as progress:
            task = progress.add_task("writing", total=None)
            manifest = import_run.write_run(
                tier,
                state,
                source=str(source),
                recipients=recipients,
                progress=lambda num_bytes: progress.advance(task, num_bytes),
            )
    _say(arguments, state, str(manifest.name), manifest.num_bytes)
    return 0


def _change(state: ImportedState, arguments: argparse.Namespace) -> None:
    """Apply --without, --rename, --epoch and --step."""
    holders: tuple[dict[str, Any], ...] = (state.models, state.optimizers, state.objects)

    def must_have(option: str, key: str, name: str = "") -> None:
        taken = sorted(key for holder in holders for key in holder)
        if key not in taken or name in taken:
            raise ConfigurationError(
                f"{option}: the source has {', '.join(taken)}", hint="name one of these as KEY"
            )

    for key in arguments.without:
        must_have(f"--without {key}", key)
        for holder in holders:
            holder.pop(key, None)
        state.left[key] = "left out by --without"
    for key, name in arguments.rename:
        must_have(f"--rename {key}={name}", key, name)
        for holder in (*holders, state.tied):
            if key in holder:
                holder[name] = holder.pop(key)
    if arguments.epoch is not None:
        state.epoch = arguments.epoch
        state.left.pop("epoch", None)
    if arguments.step is not None:
        state.step = arguments.step


def _say(arguments: argparse.Namespace, state: ImportedState, name: str, num_bytes: int) -> None:
    epoch = state.epoch or 0
    came = {
        **{model: f"{len(tensors)} tensors" for model, tensors in state.models.items()},
        **{
            opt: f"state of {len(tree['state'])} parameters"
            for opt, tree in state.optimizers.items()
        },
        **dict.fromkeys(state.objects, "state"),
    }
    left = {
        **state.left,
        "position in the data": f"the data begin at the start of epoch {epoch}",
        "random generators": "they stay as the script seeds them",
    }
    if arguments.json:
        output.document(
            {
                "run": arguments.run,
                "snapshot": name,
                "format": state.format,
                "epoch": epoch,
                "step": state.step,
                "bytes": num_bytes,
                "came": came,
                "left": left,
            }
        )
        return
    print(f"{arguments.run}: {name} from {state.format}, {output.size(num_bytes)}")
    output.table(("part", "taken over"), came.items())
    output.table(("part", "not taken over"), left.items())
    names = (*state.models, *state.optimizers, *state.objects)
    keywords = ", ".join(f"{name}={name}" for name in names if name.isidentifier())
    print(f'continue: Checkpointer("{arguments.run}", {keywords}, ...)', file=sys.stderr)
    print(
        f'weights alone: Checkpointer(NEW_RUN, init_from="{arguments.run}", ...)', file=sys.stderr
    )


def _scratch(url: str) -> str | None:
    """Return the folder for temporary files: beside the new run, where there is space for it."""
    parent = Path(url).parent
    return str(parent) if "://" not in url and parent.is_dir() else None


def _number(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 0 on")
    return int(word)


def _rename(word: str) -> tuple[str, str]:
    key, _, name = word.partition("=")
    if not key or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{word!r} is not KEY=NAME")
    return key, name
