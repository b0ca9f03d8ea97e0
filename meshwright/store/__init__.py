"""Where durable files live: new files, and one way to publish them."""
