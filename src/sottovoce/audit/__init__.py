"""What an attacker can really tell of a run: canaries among its users, attacks on its model, and the verdict."""
