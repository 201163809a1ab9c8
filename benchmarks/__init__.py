"""Measurements of speed, memory and quality: README.md lists the scripts."""
