"""The version of this package, for every module to import."""

__version__ = "0.1.0"
