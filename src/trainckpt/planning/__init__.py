"""Decide how often to save, and predict what failures cost.

closed_forms      interval of each level, and the expected loss: what `every="auto"` uses too
run_history       what a run's saves cost, and how often it has failed
advice            options of a run, each with its reason

cluster           sizes and bandwidths of a cluster and its job
faults            faults by kind, drawn at random or read from a trace
save_systems      how systems save, with intervals from the closed forms
shared_link       bandwidth that transfers share, in simulated time
simulation        one job under faults, as discrete events
presets           published jobs
loss_plots        pictures of what is lost
"""
