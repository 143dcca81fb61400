"""Launch commands, and classify how they end: signals, restarts, deadlines, exit codes.

supervise           launches a command, and again after a failure; the entry of this package
monitor             one launch, from start to end: effects
supervisor_signals  the signals received, and pure decisions on them, lost ranks and deadlines
outcome             how a launch ended, from the reports of ranks, agent and supervisor; pure
supervisor_record   the attempt's record, if the ranks cannot write it
torchrun_command    torchrun's command line
torchrun_agent      torchrun in a process that reports each rank's exit
processes           the processes of a launch: find them, end them
nested              supervisors launched by another one's command
early_requeue       a Slurm job stopped before its ranks began
dumper              process dumps of a launch
restored_dump       a launch restored from one
finish_uploads      uploads left when the ranks have ended
prefetch            reads the newest snapshot beside a launch
output_relay        the command's output, through files
"""
