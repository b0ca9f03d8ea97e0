"""Small experiments for the tests of the runner: fast ones, and ones that hang, crash, fail or use too much memory."""
