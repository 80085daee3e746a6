"""Where data come from: everything that :func:`fedalloy.task` takes besides the names of data sets."""
