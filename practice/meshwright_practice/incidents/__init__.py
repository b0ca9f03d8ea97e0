"""Incidents to practise on: a live job on this machine with a hidden fault, and the score of the answer."""
