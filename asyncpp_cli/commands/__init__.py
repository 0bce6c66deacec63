"""One file a command. Each imports what is slow to import (torch, submitit, polars) inside the command."""
