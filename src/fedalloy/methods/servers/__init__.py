"""What the server does with the combined update."""
