"""What is done with synthetic sets: a classifier trained on them, their quality, their mixing into training."""
