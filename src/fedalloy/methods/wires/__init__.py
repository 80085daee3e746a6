"""What happens to a contribution on its way."""
