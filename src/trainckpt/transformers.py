"""The Transformers Trainer: one callback.

    transformers.Trainer(..., callbacks=[trainckpt.transformers.TrainckptCallback("runs/x")])

docs/transformers.md says what is exact and what is refused.
"""

from trainckpt.integrations.compat import require

require("transformers", "transformers")
require("accelerate", "accelerate")

from trainckpt.integrations.transformers_callback import (  # noqa: E402 - the extra is asked first
    TrainckptCallback,
)

__all__ = ["TrainckptCallback"]
