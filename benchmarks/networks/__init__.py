"""Servers and nodes as processes on this machine, for `benchmarks/deployment.py`."""
