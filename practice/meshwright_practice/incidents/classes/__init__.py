"""The classes of incidents: a row and the function that draws it, for each."""
