"""`python -m gccompress`, as launchers of several processes want it."""

from gccompress.cli import main

if __name__ == "__main__":
    main()
