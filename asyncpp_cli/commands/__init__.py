"""One file a command. Each imports what is slow to import (torch, polars) inside the command."""
