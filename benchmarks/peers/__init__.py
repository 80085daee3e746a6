"""Other frameworks for federated learning on the same four workloads, each in a virtual environment of its own."""
