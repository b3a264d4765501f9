"""Compares the runner's graphs with eager runs: at capture, and in steps of the service."""
