"""Decide how often to save, and predict what failures cost.

closed_forms      interval of each level, and the expected loss: what `every="auto"` uses too
"""
