"""How well a recogniser understands people, and what it hears in a file."""
