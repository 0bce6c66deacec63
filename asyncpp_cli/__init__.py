"""What a person types. Starts without importing torch, submitit or polars: commands import what they need."""

from asyncpp_cli.base.package_check import find_our_own

find_our_own()
