"""The tuner: presets, measurement, the race, isolation, and the sweep that drives them."""
