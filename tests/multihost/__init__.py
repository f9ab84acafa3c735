"""Hosts with addresses of their own on one machine; `python -m tests.multihost --help`."""
