"""Tasks with verifiable answers, their tokenizer, and prompts as a source."""
