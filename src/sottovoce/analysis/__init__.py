"""How the recordings of a store differ from client to client."""
