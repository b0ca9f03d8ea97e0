"""What Meshwright costs beside its peers, measured in the same run on the same machine."""
