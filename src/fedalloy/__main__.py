"""``python -m fedalloy`` is the command ``fedalloy``."""

from fedalloy.cli import main
from fedalloy.cli.importing import forget_current_folder

if __name__ == "__main__":
    forget_current_folder()
    main()
