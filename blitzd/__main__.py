"""`python -m blitzd` is the `blitzd` executable."""

from blitzd.cli import main

if __name__ == "__main__":
    main()
