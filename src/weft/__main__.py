"""`python -m weft` is `weft`: it starts the command line and nothing else."""

from weft.cli.main import main

if __name__ == "__main__":
    main()
