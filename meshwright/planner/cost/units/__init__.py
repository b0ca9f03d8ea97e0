"""What one pipeline rank has of the model: its stages, parameters and FSDP units."""
