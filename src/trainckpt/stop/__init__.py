"""Ways an attempt ends: the notices, the final save within the deadline, and the exit.

A stop, from the signal on:

    preemption.signal_source  receives it; `early_signals` keeps those that come before `start`
    notice_sources            lists what else may ask for a stop, and logs each notice at once
    ranks.notice_watcher      agrees with the other ranks on a boundary
    notice_listener           holds all of these, and begins the `deadline`
    final_save                saves at that boundary
    shutdown                  records the end, and exits
    hard_exit                 exits from another thread if a step does not come in time

Under `trainckpt run` the supervisor receives signals first (`launcher.supervisor_signals`).
"""
