"""torchrun with a number of agents that changes: killed, added, replaced, told to stop.

train.py     the script of every test
agents.py    the agents of a launch
trace.py     what its ranks trained, and the verdict: exact, same data or failed
storm.py     what storms of events have in common, also those of `tests.ray_chaos`
chaos.py     a random sequence of such events, by its seed: `python -m tests.elastic`
"""
