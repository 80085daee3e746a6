"""Pages about runs, made with only the standard library."""
