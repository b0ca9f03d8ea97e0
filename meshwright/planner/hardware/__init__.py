"""Devices, links and clusters, as presets, as files, or as measured on this machine."""
