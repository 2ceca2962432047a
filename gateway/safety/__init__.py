"""Policies and scorers of what goes in and comes out (a later version)."""
