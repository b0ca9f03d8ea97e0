"""A simulation of many hosts in one process: the real supervisor protocol on a virtual network, store and clock."""
