"""What all areas share: config, topology, model specs, hardware, the store, records and their readers. Torch-free."""
