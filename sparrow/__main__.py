"""``python -m sparrow`` is the command line."""

from sparrow.cli.main import main

if __name__ == "__main__":
    main()
