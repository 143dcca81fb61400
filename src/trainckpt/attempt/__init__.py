"""One attempt of a run, as its ranks see it.

options                 what the user set
launch, fingerprint     facts of the start: command, environment, software and hardware
git_commit              the commit of the script, asked for in a thread
record_writer           the attempt's record in the run directory, for good
status_files            the rank's status for the processes of its launch, until they end
heartbeat               the sign of life in the run directory
progress_counter        steps, micro-batches and epochs so far
save_handle             one save, from its request to its commit
"""
