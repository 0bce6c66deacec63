"""The commands `asyncpp` and `python -m asyncpp_cli`; jobs use the latter, which needs no console script."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from asyncpp_cli.main import main as run

        run()
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(130)
    except SystemExit as leaving:
        if "torch" not in sys.modules or not isinstance(leaving.code, int):
            raise
        import atexit

        from stages.config.torch_process import leave

        atexit._run_exitfuncs()
        leave(leaving.code)


if __name__ == "__main__":
    main()
