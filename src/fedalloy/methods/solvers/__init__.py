"""What a client does with what it receives."""
