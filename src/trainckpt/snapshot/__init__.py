"""The semantic path: shard files and manifests. Bytes and plans; no tensors."""
