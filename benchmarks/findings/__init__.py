"""How docs/RESULTS.md is made: runs are kept small below results/, and a template's macros are filled in from them."""
