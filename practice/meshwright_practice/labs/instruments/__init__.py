"""What the checks measure with: the order and bytes of messages, live tensor bytes, and saved tensors."""
