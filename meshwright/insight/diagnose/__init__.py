"""Evidence, cause and next move: diagnoses a run from its records, or any program from its traces. Torch-free."""
