"""Callbacks: what a run calls with its records; `meshwright.callbacks` exports them to users."""
