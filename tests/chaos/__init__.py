"""Faults put into a running deployment under load; `python -m tests.chaos --help`."""
