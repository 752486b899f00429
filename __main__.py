"""`python -m tim_trace` is `tim-trace`."""

from tim_trace.cli import main

main()
