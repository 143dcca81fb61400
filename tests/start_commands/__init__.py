"""Each launcher, with real processes: signalled, started again, its exit code, the run's trace.

Every test takes one run through all of its launcher: a stop, the same command again, another stop,
and at last to the end. Nothing is trained twice, so the run's trace is that of the uninterrupted
run, byte for byte.

started.py          one start of a command; the run it works on
conftest.py         the warm server, and the uninterrupted run
slurm_tasks.py      the example, its rank told by Slurm's variables alone
accelerated.py      the example, its process group made by an Accelerator
"""
