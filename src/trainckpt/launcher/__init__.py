"""Launches commands, and answers for how they end: signals, restarts, deadlines, exit codes.

supervise   launches a command, and again where it failed; the room's front door
launched    one launch, from start to end: the effects
orders      what to do about a signal, a lost rank, a deadline, a failure: pure
verdict     how a launch ended, from everybody's words: pure
record      the attempt's record, where nobody else can write it
command     torchrun's command line
agent       torchrun itself, as a process that tells us how each rank ended (`report`)
processes   who lives, who descends from whom, and an end to all of them
nested      a supervisor within another one's launch
signals     what this process is sent
early_stop  a Slurm job that is stopped before its ranks have begun
"""
