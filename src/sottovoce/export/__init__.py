"""What travels with a model: its guarantee, and the check of it by whoever receives it."""
