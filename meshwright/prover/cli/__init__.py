"""The verbs of the prover: prove, simulate, replay, bisect."""
