"""Lightning: `Trainer(callbacks=[trainckpt.lightning.TrainckptCallback("runs/x")])`, nothing else.

Works with `lightning` and, if that was imported instead, with `pytorch_lightning`.
"""

import sys

from trainckpt.integrations.compat import require

if "pytorch_lightning" not in sys.modules:
    require("lightning.pytorch", extra="lightning")

from trainckpt.integrations.lightning_callback import TrainckptCallback

__all__ = ["TrainckptCallback"]
