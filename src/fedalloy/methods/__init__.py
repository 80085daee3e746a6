"""Methods put together from solvers, weightings, servers and wires."""
