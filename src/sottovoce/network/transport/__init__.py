"""What carries messages between a server and its nodes: bytes over TLS by way of Flower, limited and authenticated."""
