"""Benchmarks behind ``ostinato bench``. Results are committed under ``benchmarks/results``."""
