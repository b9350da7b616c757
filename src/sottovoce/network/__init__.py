"""Training with the speech on other people's machines: what travels, who is trusted with what, what carries it."""
