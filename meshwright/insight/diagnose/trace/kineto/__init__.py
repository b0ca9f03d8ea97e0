"""Reads the traces that Kineto, the library of torch.profiler, writes: untrusted, of any size, possibly damaged."""
