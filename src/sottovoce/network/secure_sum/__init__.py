"""Secure aggregation: sums of clients' words of which the server sees no single one (Bonawitz et al., 2017)."""
