"""How docs/RESULTS*.md are made: runs are kept small in results/, and Jinja templates are filled in from them."""
