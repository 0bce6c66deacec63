"""The commands `asyncpp` and `python -m asyncpp_cli`; jobs use the latter, which needs no console script."""

import sys


def main() -> None:
    """Run the command line; a damaged installation is reported in one line, with exit code 2."""
    try:
        from asyncpp_cli.main import main as run
    except ImportError:
        from asyncpp_cli.package_check import what_happened

        if (problem := what_happened()) is None:
            raise
        print(f"asyncpp: error: {problem}", file=sys.stderr)
        sys.exit(2)
    try:
        run()
    except SystemExit as leaving:
        if "torch" not in sys.modules or not isinstance(leaving.code, int):
            raise
        import atexit

        from stages.torch_process import leave

        atexit._run_exitfuncs()
        leave(leaving.code)


if __name__ == "__main__":
    main()
