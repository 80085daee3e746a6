"""The parts of the engine ``ray``: the connection, the driver's side, a worker, what stays with the workers."""
