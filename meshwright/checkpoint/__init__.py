"""What survives: state -> shards -> digests -> manifest -> publish; restore, reshard, retention."""
