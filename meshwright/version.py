"""The version of the package, in a module that every other module can import."""

__version__ = "0.3.0"
