"""The executable handbook: cards, labs, incidents and the timed interview, all run by the code that trains."""
