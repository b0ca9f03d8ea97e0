"""Turns text, JSONL, Parquet and datasets on disk into token shards: in parallel, resumable and deterministic."""
