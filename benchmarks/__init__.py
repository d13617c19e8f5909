"""Measurements side by side with other systems; run from the clone."""
