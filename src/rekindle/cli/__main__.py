"""`python -m rekindle.cli`."""

from rekindle.cli import main

if __name__ == "__main__":
    main()
