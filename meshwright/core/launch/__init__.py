"""How ranks are started: forked on this host, by a fork server or by this process, or started by torchrun."""
