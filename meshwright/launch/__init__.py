"""How ranks come to life: forked on this host, or started by torchrun."""
