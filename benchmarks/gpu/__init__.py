"""Judge trainckpt on a GPU: `python -m benchmarks.gpu`; docs/gpu.md says what the figures mean."""
