"""Models by name: each file registers the factories of one family, and ``build`` looks them up."""
