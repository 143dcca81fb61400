"""What trainckpt makes of keys of torchtitan's `[checkpoint]`: `python -m ... FOLDER`.

Prints one JSON document: the case -> what it came to. The folder has a run of trainckpt, `run`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

from tests.integrations.titan_job import use_cpu

CASES = {
    "as it is": {},
    "seed": {"create_seed_checkpoint": True},
    "load only": {"load_only": True},
    "excluded at a resume": {"exclude_from_loading": ["optimizer"]},
    "excluded at the beginning": {
        "exclude_from_loading": ["optimizer"],
        "initial_load_path": "/elsewhere/step-3",
        "initial_load_model_only": False,
    },
    "excluded of a run": {"exclude_from_loading": ["optimizer"], "initial_load_path": "RUN"},
    "a snapshot": {"initial_load_path": "RUN@s3"},
    "a whole run": {"initial_load_path": "RUN", "initial_load_model_only": False},
    "a run in another format": {"initial_load_path": "RUN", "initial_load_in_hf": True},
    "all are kept": {"keep_latest_k": 0},
    "by the clock": {"options": {"every": "10 min"}},
    "kept twice": {"options": {"keep_last": 3}},
    "no option": {"options": {"evry": "10 min"}},
    **{f"async_mode {mode}": {"async_mode": mode} for mode in ("async", "async_with_pinned_mem")},
}


def main(folder):
    use_cpu()
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.components.checkpointer import CheckpointManager as DcpManager
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides
    from torchtitan.trainer import Trainer

    import trainckpt.torchtitan
    from trainckpt.errors import ConfigurationError
    from trainckpt.integrations import torchtitan_manager as manager

    found = {}

    def note(name, act):
        try:
            found[name] = act()
        except ConfigurationError as error:
            found[name] = {"refused": error.message, "next": error.hint}

    for name, keys in CASES.items():
        keys = {key: _placed(value, folder) for key, value in keys.items()}
        config = trainckpt.torchtitan.CheckpointManager.Config(enable=True, interval=7, **keys)

        def options(config=config):
            manager.refuse_config(config)
            return manager.options_of(config)

        note(name, options)

    @dataclass(kw_only=True, slots=True)
    class Other(BaseCheckpointManager.Config):
        quorum: int = 1

    note("another manager", lambda: str(manager.config_in_place_of(Other(), {})))

    class Own(Trainer):
        def train_step(self, data_iterator):
            pass

    class Counts(Trainer):
        def state_dict(self):
            return {**super().state_dict(), "documents": 7}

    note("own state", lambda: manager.refuse_trainer(Counts.__new__(Counts)))
    note("own step", lambda: manager.refuse_trainer(Own.__new__(Own)))
    note("own loop", lambda: manager.refuse_trainer(SimpleNamespace()))
    note("torchtitan's own", lambda: manager.refuse_trainer(Trainer.__new__(Trainer)))
    found["fields"] = sorted(each.name for each in fields(DcpManager.Config))

    page = Path(__file__).parents[2].joinpath("docs/torchtitan.md").read_text(encoding="utf-8")
    command = page.partition("$ trainckpt run")[2].partition("```")[0].replace("\\\n", " ")
    config = ConfigManager().parse_args(command.split("torchtitan.train", 1)[1].split())
    apply_overrides(config.override, config)
    found["the page's command"] = [type(config.checkpoint).__qualname__, config.checkpoint.interval]
    code = page.partition("```python\n")[2].partition("```")[0]
    (folder / "torchtitan_jobs.py").write_text(code)
    sys.path.insert(0, str(folder))
    config = ConfigManager().parse_args(["--module", "torchtitan_jobs", "--config", "pretrain"])
    found["the page's module"] = manager.options_of(config.checkpoint)
    print(json.dumps(found))


def _placed(value, folder):
    return value.replace("RUN", str(folder / "run")) if isinstance(value, str) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
