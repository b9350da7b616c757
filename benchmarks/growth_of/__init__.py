"""What `benchmarks/growth.py` measures, fits and writes: a module for each dimension."""
