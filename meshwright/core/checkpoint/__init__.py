"""Checkpoints: state -> shards -> digests -> manifest -> publish; restore, reshard and retention.

A checkpoint comes into existence at one call: `publish_if_absent` of its manifest, in `CheckpointSaver._publish`
(saver.py). Before that call its files are unreferenced and retention deletes them.
"""
