"""What happens to a contribution between client and server."""
