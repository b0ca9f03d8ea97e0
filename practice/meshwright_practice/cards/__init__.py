"""Cards: questions whose answers are predicted, run and seen."""
