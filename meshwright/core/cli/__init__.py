"""The verbs of the trainer: one module per verb, arguments and wiring."""
