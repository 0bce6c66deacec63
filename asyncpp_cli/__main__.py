"""`asyncpp`, and `python -m asyncpp_cli` for jobs: that needs no console script on the path."""

import sys


def main() -> None:
    """Run the command line; an installation that is damaged is told in one line, with exit code 2."""
    try:
        from asyncpp_cli.main import main as run
    except ImportError:
        from asyncpp_cli.own_packages import what_happened

        if (told := what_happened()) is None:
            raise
        print(f"asyncpp: error: {told}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
