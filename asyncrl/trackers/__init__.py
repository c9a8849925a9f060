"""Experiment trackers: `tracker.py` says what one is, `delivery.py` calls them; one small file each."""
