"""What `import trainckpt` gives, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys

import trainckpt

NAMES = [
    "Attributes",
    "Checkpointer",
    "ConfigurationError",
    "Cursor",
    "NoAgreement",
    "NoUsableSnapshot",
    "NothingToResume",
    "SaveFailed",
    "StateMismatch",
    "Stopped",
    "TierUnavailable",
    "TrainckptError",
    "UnusableSnapshot",
    "load",
]


def test_the_names_are_these():
    assert trainckpt.__all__ == NAMES
    assert sorted(trainckpt.__all__) == trainckpt.__all__
    assert all(hasattr(trainckpt, name) for name in trainckpt.__all__)


def test_importing_it_draws_no_random_number_and_imports_no_trainer():
    code = (
        "import json, random, sys, torch; before = random.getstate(), torch.get_rng_state()\n"
        "import trainckpt\n"
        "same = before[0] == random.getstate() and torch.equal(before[1], torch.get_rng_state())\n"
        "trainers = ['lightning', 'pytorch_lightning', 'accelerate', 'transformers', 'ray']\n"
        "trainers += ['torchtitan']\n"
        "loaded = [name for name in trainers if name in sys.modules]\n"
        "print(json.dumps([same, loaded]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, []]
