"""`python -m asyncpp_cli`, for jobs: it needs no console script on the path."""

from asyncpp_cli.main import main

if __name__ == "__main__":
    main()
