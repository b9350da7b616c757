"""Federated training: one round of Algorithm 1, and what clients, server and engines do in it."""
