"""What is learned and on what: data sets, partitions, devices, models, losses and metrics."""
