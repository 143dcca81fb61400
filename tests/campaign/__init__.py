"""The exactness campaign: random runs, stopped at random instants, compared byte for byte.

cases.py     a case is a pure function of its seed
one_rank.py  another family of cases: `trainckpt run`, SIGTERM to one of 2, 4 or 8 ranks
layouts.py   another: FSDP, HSDP, tensor parallel on 1 to 4 ranks
reshard.py   another: a run that goes on in other layouts, again and again
families.py  which families there are
server.py    a process that has torch loaded, from which ranks fork
gate.py      ranks that wait until they were hit
launch.py    one attempt of a case: forked ranks, the real torchrun, or `trainckpt run`
watch.py     what can be seen of an attempt from outside: trace, snapshots, workers
drive.py     run a case: launch, stop, launch again until the run is finished
check.py     what must be true of each attempt, and of the merged trace
check_reshard.py  what must be true where the layout has changed
report.py    one line a case, and the distribution of all lines
"""
