"""The methods side by side on six federations, each tuned with the same budget."""
