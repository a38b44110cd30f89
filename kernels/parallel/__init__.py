"""The vocabulary split over the ranks of a process group: statistics merged, dX summed.

Every rank holds all tokens and some rows of the head. It computes the statistics of its own
logits, one small all-gather merges them into those of the whole vocabulary, and the gradients
follow from the merged ones as they do on one device.
"""
