"""Proofs on the devices of this machine: every axis, in bf16 and float32, compiled and not."""
