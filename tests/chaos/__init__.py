"""Chaos: random runs that meet one to four faults each, in every room that a user may train in.

rooms.py    what a run trains with, where its snapshots go, who keeps them
faults.py   the catalogue of faults
disk.py     a file system of ours that goes wrong at the n-th call
late_disk.py   a host's view of a file server, which shows changes of others late
train.py    a rank: an example, at a pace, behind a gate
stage.py    what cases run on: warm servers, hosts, the disk, an object store behind doors
attempt.py  one attempt: ranks on their hosts, or `trainckpt run`
drive.py    draw and play a case: launch, let faults happen, launch again until the run is over
judge.py    exact, same data as announced, refused as promised, or failed
soak.py     one long run that a fault hits every 20 s on the average
report.py   one line a case, and the table of faults and rooms
"""
