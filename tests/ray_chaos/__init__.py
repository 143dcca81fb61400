"""Ray Train under chaos: workers, nodes and drivers that are killed, frozen, drained, added.

job.py       the driver of a training, and what its workers run
cluster.py   the nodes of a cluster on this machine
chaos.py     a random sequence of such events, by its seed: `python -m tests.ray_chaos`

`tests.elastic.storm` drives the events, and `tests.elastic.trace` judges what the workers trained.
"""
