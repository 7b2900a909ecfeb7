"""`python -m weft` is `weft`: it starts the command line, which a signal may end from here on."""

import sys

from weft.cli.signals import Outside


def main() -> None:
    """Run the command line of this process and exit."""
    outside = Outside(sys.argv[1:])
    outside.install()
    from weft.cli import main as command

    outside.imported()
    command.main()


if __name__ == "__main__":
    main()
