"""A node's side: consent, its folder and ledger, its recordings, training, and the loop that answers orders."""
