"""Supervised fine-tuning data: chats with a template, the loss on answers alone, and packing with boundaries."""
