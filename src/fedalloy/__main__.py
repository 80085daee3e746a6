"""``python -m fedalloy`` is the command ``fedalloy``."""

from fedalloy.cli import main

if __name__ == "__main__":
    main()
