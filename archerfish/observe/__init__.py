"""Counters, histograms and comparisons of figures. Nothing here imports another part of the package."""
