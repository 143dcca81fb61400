"""Plan, write, commit, read and verify snapshots: shard files and manifests, no tensors."""
