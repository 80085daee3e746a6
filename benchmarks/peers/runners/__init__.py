"""One program per framework. Each runs in its own environment and takes turns with the others (:mod:`.turns`)."""
