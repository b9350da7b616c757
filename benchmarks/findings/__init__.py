"""How docs/RESULTS.md is made: runs are kept small in results/, and a Jinja template is filled in from them."""
