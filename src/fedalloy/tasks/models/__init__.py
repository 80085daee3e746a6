"""Models by name: each file registers the factories of one family; ``build`` finds them."""
