"""The layers that the families share. They contain no parallelism; parallelism replaces some of their submodules."""
