"""What an attacker can learn from a run: canaries among its users, attacks on its model, and the verdict."""
