"""Recognition of stores, files and streams, error rates, and comparisons."""
