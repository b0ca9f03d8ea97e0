"""The contracts of a run as checks that can fail, and the steps of a run taken again."""
