"""Prove: run a script straight and interrupted, and compare."""
