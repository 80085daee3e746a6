"""Where examples come from: one small loader per data set."""
