"""The rules: what a client does, how much a contribution counts, how the server moves, what travels."""
