"""Pages about runs, made with the standard library alone."""
