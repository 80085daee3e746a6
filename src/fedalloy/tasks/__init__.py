"""Learning tasks: data sets, partitions, devices, models, losses and metrics."""
