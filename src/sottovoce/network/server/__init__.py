"""The server's side: which nodes are available, what they are asked, and the clients of a run that they make up."""
