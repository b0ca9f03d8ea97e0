"""Lower bounds of step time and memory, by which the search orders candidates and skips them."""
